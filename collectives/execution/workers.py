"""Threads that encode, merge and decode pieces while the thread that makes the call polls.

Kernels hold no interpreter lock, so pieces are worked on at the same time. What a piece becomes does not depend on the
thread, so results have the same bits with any number of threads.

A piece takes some hundred microseconds. A pool of `concurrent.futures` holds the interpreter's lock for nearly as long
to hand one over and to wait for one of several; the queues here take a few.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from collectives.annotations import Testable
from collectives.trace.traffic import Traffic

MOST_THREADS = 1024
LOOK_S = 1e-4  # how long to sleep at most between two looks at messages, while all workers are busy
LONG_LOOK_S = 0.1  # the same where no message is awaited
DEPTH = 2  # jobs a worker: the next one is there when one is done
DEVICE_S = 1.0  # for how long a device is waited for whose work nobody wants
ON_DEVICES = 4  # pieces that devices work on at once: what is copied hides behind what is computed

Work = Callable[..., Testable | None]
"""Done when it returns, or once a device is found to have done what it returns."""
Task = Callable[[], None]


class _Number(threading.local):
    value = 0


_number = _Number()


def worker_number() -> int:
    """Which of its communicator's workers the calling thread is, from 1 on; 0: it is none."""
    return _number.value


class Workers:
    """The workers of one communicator; they start with the first piece.

    Parameters
    ----------
    threads : int
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._started: list[threading.Thread] = []
        self._dismissed = False
        self._process = os.getpid()

    @property
    def are_here(self) -> bool:
        """Whether this is the process that they work in: a forked one has no threads."""
        return os.getpid() == self._process

    def start(self, task: Task) -> None:
        """Have a worker do something that raises nothing; if they were dismissed, it is done here.

        Raises
        ------
        RuntimeError
            The system starts no more threads.
        """
        if self._dismissed:
            task()
            return
        while len(self._started) < self.threads:
            number = len(self._started) + 1
            about = self._tasks, number
            thread = threading.Thread(target=_serve, args=about, name=f"mpicomp worker {number}", daemon=True)
            thread.start()
            self._started.append(thread)
            if number == 1:
                weakref.finalize(self, _dismiss, self._tasks, self.threads).atexit = False
        self._tasks.put(task)

    def dismiss(self) -> None:
        """Let the threads end once they have done what they were given."""
        if not self._dismissed:
            self._dismissed = True
            _dismiss(self._tasks, len(self._started))

    def close(self) -> None:
        """Dismiss the threads, and wait for their end."""
        self.dismiss()
        for thread in self._started:
            thread.join()


def _serve(tasks: SimpleQueue[Task | None], number: int) -> None:
    _number.value = number
    while (task := tasks.get()) is not None:
        task()
        del task  # it has the buffers of a call


def _dismiss(tasks: SimpleQueue[Task | None], threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)


class _Job:
    """Work under way; `then` is called once it is done.

    A worker that comes to it when it is no longer wanted leaves it undone. `on_device` tells when a device has done its
    part.
    """

    __slots__ = ("error", "is_over", "is_wanted", "on_device", "phase", "seconds", "then")

    def __init__(self, phase: str, then: Task) -> None:
        self.phase, self.then = phase, then
        self.is_wanted, self.is_over, self.seconds = True, False, 0.0
        self.on_device: Testable | None = None
        self.error: BaseException | None = None


class Jobs:
    """The work of one run of a program: done by the thread that asks for it, or by workers, and to its end by devices.

    Parameters
    ----------
    workers : Workers or None
        None: the thread that asks does all that a device does not.
    traffic : Traffic
        The seconds of each piece of work are added to one of its numbers; what devices do is not counted.

    Attributes
    ----------
    rested_s : float
        In which the thread that asks for work slept while workers worked.
    """

    def __init__(self, workers: Workers | None, traffic: Traffic) -> None:
        self.at_once = workers is None
        self._workers, self._traffic = workers, traffic
        self._most = ON_DEVICES if workers is None else DEPTH * workers.threads
        self._given: list[_Job] = []  # that workers have, or have done, and that are not collected
        self._ready: list[_Job] = []  # collected, and not gone on from
        self._finished: SimpleQueue[_Job] = SimpleQueue()
        self._devices: list[_Job] = []
        self.rested_s = 0.0

    @property
    def all_busy(self) -> bool:
        """Whether every worker has a job, and another one to go on with, or devices have enough to do."""
        return len(self._given) + len(self._devices) >= self._most

    def do(self, phase: str, then: Task, work: Work, *operands: Any) -> None:
        """Have work done whose seconds count as those of a phase, and `then` what depends on it.

        `then` is called by the thread that asks for the work: here, or in `collect`.
        """
        job = _Job(phase, then)
        if self._workers is not None:
            self._workers.start(partial(_do, job, self._traffic.clock, work, operands, self._finished))
            self._given.append(job)
            return
        start = self._traffic.clock()
        job.on_device = work(*operands)
        job.seconds = self._traffic.clock() - start
        self._go_on(job)

    def collect(self) -> bool:
        """Take note of the jobs that are done, and raise what they raised; False if none is."""
        if not (self._given or self._devices):
            return False
        done = [job for job in self._devices if job.on_device is None or job.on_device.Test()]
        for job in done:
            self._devices.remove(job)
            job.then()
        moved = bool(done)
        while self._given:
            try:
                job = self._ready.pop() if self._ready else self._finished.get_nowait()
            except Empty:
                break
            self._given.remove(job)
            moved = True
            self._go_on(job)
        return moved

    def rest(self, messages: bool) -> bool:
        """Sleep until a worker is done, but not for long where messages are awaited; False: no worker has anything."""
        if not self._given:
            return False
        start = self._traffic.clock()
        if not self._ready:
            with suppress(Empty):
                self._ready.append(self._finished.get(timeout=LOOK_S if messages else LONG_LOOK_S))
        self.rested_s += self._traffic.clock() - start
        return True

    def end(self) -> None:
        """Wait for workers and devices, whatever becomes of their work: its buffers are to be used otherwise.

        What no worker has begun is left undone. A device is not waited for longer than `DEVICE_S`. Ctrl-C is raised
        when the wait is over.
        """
        if not (self._given or self._devices) or not (self._workers is None or self._workers.are_here):
            return
        interrupted: KeyboardInterrupt | None = None
        for job in self._given:
            job.is_wanted = False
        give_up = time.monotonic() + DEVICE_S
        while not self._is_over(time.monotonic() < give_up):
            try:
                with suppress(Empty):
                    self._finished.get(timeout=LOOK_S)
            except KeyboardInterrupt as error:
                interrupted = error
        self._given.clear()
        self._ready.clear()
        self._devices.clear()
        if interrupted is not None:
            raise interrupted

    def _is_over(self, on_devices: bool) -> bool:
        """Whether no worker has a job, and no device either if that is to count."""
        if not all(job.is_over for job in self._given):
            return False
        return not on_devices or all(job.on_device is None or job.on_device.Test() for job in self._devices)

    def _go_on(self, job: _Job) -> None:
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # its traceback has this frame, and they would keep each other
        setattr(self._traffic, job.phase, getattr(self._traffic, job.phase) + job.seconds)
        if job.on_device is None:
            job.then()
        else:
            self._devices.append(job)


def _do(
    job: _Job, clock: Callable[[], float], work: Work, operands: tuple[Any, ...], finished: SimpleQueue[_Job]
) -> None:
    start = clock()
    try:
        if job.is_wanted:
            job.on_device = work(*operands)
    except BaseException as error:  # noqa: BLE001 - raised by the thread that asked
        job.error = error
    job.seconds, job.is_over = clock() - start, True
    finished.put(job)
