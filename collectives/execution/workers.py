"""Threads that encode, merge and decode pieces while the thread that makes the call polls.

Kernels hold no interpreter lock, so pieces are worked on at the same time. What a piece becomes does not depend on the
thread, so results have the same bits with any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

from collectives.testable import Testable
from collectives.trace.traffic import Traffic

MOST_THREADS = 1024
LOOK_S = 1e-4  # how long to sleep at most between two looks at messages, while all workers are busy
DEPTH = 2  # jobs a worker: the next one is there when one is done
ON_DEVICES = 4  # pieces that devices work on at once: what is copied hides behind what is computed


class _Number(threading.local):
    value = 0


_number = _Number()


def worker_number() -> int:
    """Which of its communicator's workers the calling thread is, from 1 on; 0: it is none."""
    return _number.value


Work = Callable[..., Testable | None]
"""Done when it returns, or once a device is found to have done what it returns."""


class Done(NamedTuple):
    """What became of work: the seconds that it took here, and what a device has yet to do."""

    seconds: float
    on_device: Testable | None


class Workers:
    """The workers of one communicator; they start with the first piece.

    Parameters
    ----------
    threads : int
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._numbers = iter(range(1, threads + 1))
        self._pool = ThreadPoolExecutor(threads, "mpicomp worker", self._begin)

    def _begin(self) -> None:
        _number.value = next(self._numbers)

    def start(self, clock: Callable[[], float], work: Work, *operands: Any) -> Future[Done]:
        """Have a worker call `work` with these operands."""
        return self._pool.submit(_timed, clock, work, operands)

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        self._pool.shutdown()


def _timed(clock: Callable[[], float], work: Work, operands: tuple[Any, ...]) -> Done:
    start = clock()
    on_device = work(*operands)
    return Done(clock() - start, on_device)


class _Job(NamedTuple):
    """Work under way: whether it is done, what is to be called then, and the future of a worker, if one does it."""

    is_done: Callable[[], bool]
    complete: Callable[[], None]
    future: Future[Done] | None


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
        self._running: list[_Job] = []
        self.rested_s = 0.0

    @property
    def all_busy(self) -> bool:
        """Whether every worker has a job, and another one to go on with, or devices have enough to do."""
        return len(self._running) >= self._most

    def do(self, phase: str, then: Callable[[], None], work: Work, *operands: Any) -> None:
        """Have work done whose seconds count as those of a phase, and `then` what depends on it.

        `then` is called by the thread that asks for the work: here, or in `collect`.
        """
        clock = self._traffic.clock
        if self._workers is not None:
            future = self._workers.start(clock, work, *operands)
            self._running.append(_Job(future.done, partial(self._take, future, phase, then), future))
            return
        start = clock()
        on_device = work(*operands)
        self._count(phase, clock() - start)
        self._go_on(on_device, then)

    def collect(self) -> bool:
        """Take note of the jobs that are done, and raise what they raised; False if none is."""
        if not self._running:
            return False
        done = [job for job in self._running if job.is_done()]
        for job in done:
            self._running.remove(job)
            job.complete()
        return bool(done)

    def rest(self, messages: bool) -> bool:
        """Sleep until a worker is done, but not for long where messages are awaited; False: no worker has anything."""
        futures = self._futures()
        if not futures:
            return False
        start = self._traffic.clock()
        wait(futures, LOOK_S if messages else None, FIRST_COMPLETED)
        self.rested_s += self._traffic.clock() - start
        return True

    def end(self) -> None:
        """Wait for all workers, whatever becomes of their work: its buffers are to be used otherwise."""
        if self._running:
            wait(self._futures())
            self._running.clear()

    def _futures(self) -> list[Future[Done]]:
        return [job.future for job in self._running if job.future is not None]

    def _take(self, future: Future[Done], phase: str, then: Callable[[], None]) -> None:
        seconds, on_device = future.result()
        self._count(phase, seconds)
        self._go_on(on_device, then)

    def _go_on(self, on_device: Testable | None, then: Callable[[], None]) -> None:
        if on_device is None:
            then()
        else:
            self._running.append(_Job(on_device.Test, then, None))

    def _count(self, phase: str, seconds: float) -> None:
        setattr(self._traffic, phase, getattr(self._traffic, phase) + seconds)
