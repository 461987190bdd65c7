"""Threads that encode, merge and decode pieces while the thread that makes the call polls.

Kernels hold no interpreter lock, so pieces are worked on at the same time. What a piece becomes does not depend on the
thread, so results have the same bits with any number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from collectives.trace.traffic import Traffic

MOST_THREADS = 1024
LOOK_S = 1e-4  # how long to sleep at most between two looks at messages, while all workers are busy
DEPTH = 2  # jobs a worker: the next one is there when one is done


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
        self._numbers = iter(range(1, threads + 1))
        self._pool = ThreadPoolExecutor(threads, "mpicomp worker", self._begin)

    def _begin(self) -> None:
        _number.value = next(self._numbers)

    def start(self, clock: Callable[[], float], work: Callable[..., object], *operands: Any) -> Future[float]:
        """Have a worker call `work` with these operands; the future has the seconds that it took."""
        return self._pool.submit(_timed, clock, work, operands)

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        self._pool.shutdown()


def _timed(clock: Callable[[], float], work: Callable[..., object], operands: tuple[Any, ...]) -> float:
    start = clock()
    work(*operands)
    return clock() - start


class Jobs:
    """The work of one run of a program: done at once by the thread that asks for it, or by workers.

    Parameters
    ----------
    workers : Workers or None
        None: all work is done at once.
    traffic : Traffic
        The seconds of each piece of work are added to one of its numbers.

    Attributes
    ----------
    rested_s : float
        In which the thread that asks for work slept while workers worked.
    """

    def __init__(self, workers: Workers | None, traffic: Traffic) -> None:
        self.at_once = workers is None
        self._workers, self._traffic = workers, traffic
        self._running: list[tuple[Future[float], str, Callable[[], None]]] = []
        self.rested_s = 0.0

    @property
    def all_busy(self) -> bool:
        """Whether every worker has a job, and another one to go on with."""
        return self._workers is not None and len(self._running) >= DEPTH * self._workers.threads

    def do(self, phase: str, then: Callable[[], None], work: Callable[..., object], *operands: Any) -> None:
        """Have work done whose seconds count as those of a phase, and `then` what depends on it.

        `then` is called by the thread that asks for the work: here, or in `collect`.
        """
        clock = self._traffic.clock
        if self._workers is not None:
            self._running.append((self._workers.start(clock, work, *operands), phase, then))
            return
        start = clock()
        work(*operands)
        self._count(phase, clock() - start)
        then()

    def collect(self) -> bool:
        """Take note of the jobs that are done, and raise what they raised; False if none is."""
        if not self._running:
            return False
        done = [job for job in self._running if job[0].done()]
        for job in done:
            self._running.remove(job)
            future, phase, then = job
            self._count(phase, future.result())
            then()
        return bool(done)

    def rest(self, messages: bool) -> bool:
        """Sleep until a job is done, but not for long where messages are awaited; False: there is no job."""
        if not self._running:
            return False
        start = self._traffic.clock()
        wait([job[0] for job in self._running], LOOK_S if messages else None, FIRST_COMPLETED)
        self.rested_s += self._traffic.clock() - start
        return True

    def end(self) -> None:
        """Wait for all jobs, whatever becomes of them: their buffers are to be used otherwise."""
        if self._running:
            wait([job[0] for job in self._running])
            self._running.clear()

    def _count(self, phase: str, seconds: float) -> None:
        setattr(self._traffic, phase, getattr(self._traffic, phase) + seconds)
