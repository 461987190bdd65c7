"""Jobs of one run of a program, or of one pass over a vector: done by workers, or by the thread that makes the call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from collectives.annotations import Testable
from collectives.arrays import Queued
from collectives.execution.call import Call
from collectives.execution.staged import leave_queued
from collectives.execution.traffic import Traffic
from collectives.execution.workers import Task, Workers
from collectives.progress.polling import Backoff, until

LOOK_S = 1e-4  # longest sleep between two tests of messages while all workers are busy
LONG_LOOK_S = 0.1  # longest sleep if no message is awaited
DEPTH = 2  # jobs per worker, so that a worker finds the next job as soon as it has done one
PENDING_S = 1.0  # longest wait for a device whose work is not needed any more
MOST_PENDING = 4  # pieces that devices work on at once, so that copies overlap with computing

PieceWork = Callable[..., Testable | None]
"""Work on a piece; it is done when it returns None, or once the handle that it returns is complete."""
_KINDS = {"seconds_encoding": "encode", "seconds_decoding": "decode"}


class _Job:
    """Work under way; `then` is called once it is done.

    A worker skips a job that is not wanted any more. `handle` completes once a device has done its part.
    """

    __slots__ = ("error", "handle", "is_over", "is_wanted", "phase", "seconds", "then")

    def __init__(self, phase: str, then: Task) -> None:
        self.phase, self.then = phase, then
        self.is_wanted, self.is_over, self.seconds = True, False, 0.0
        self.handle: Testable | None = None
        self.error: BaseException | None = None


class Jobs:
    """Jobs of one run of a program: done by workers or else by the calling thread, and completed by devices.

    The seconds of each job are added to one of the numbers of `traffic`; work of devices is not counted.
    """

    def __init__(self, workers: Workers | None, traffic: Traffic) -> None:
        self.at_once = workers is None
        self._workers, self._traffic = workers, traffic
        self._most = MOST_PENDING if workers is None else DEPTH * workers.threads
        self._given: list[_Job] = []  # passed to workers, and not collected yet
        self._ready: list[_Job] = []  # taken from `_finished`, and not collected yet
        self._finished: SimpleQueue[_Job] = SimpleQueue()
        self._pending: list[_Job] = []
        self.rested_s = 0.0  # seconds that the calling thread slept while workers worked

    @property
    def all_busy(self) -> bool:
        """Return whether every worker has a job and a next one, or devices have enough to do."""
        return len(self._given) + len(self._pending) >= self._most

    def do(self, phase: str, then: Task, work: PieceWork, *operands: object) -> None:
        """Start work whose seconds count as those of a phase; call `then` once it is done.

        The calling thread calls `then`, here or in `collect`.
        """
        job = _Job(phase, then)
        if self._workers is not None:
            self._workers.start(partial(_do, job, self._traffic.clock, work, operands, self._finished))
            self._given.append(job)
            return
        start = self._traffic.clock()
        job.handle = work(*operands)
        job.seconds = self._traffic.clock() - start
        self._go_on(job)

    def collect(self) -> bool:
        """Complete the jobs that are done, and raise their errors; return False if no job is done."""
        if not (self._given or self._pending):
            return False
        done = [job for job in self._pending if job.handle is None or job.handle.Test()]
        for job in done:
            self._pending.remove(job)
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

    def are_queued(self, count: int) -> bool:
        """Return True if `count` jobs are left, and a stream may wait for all of them in the host's place."""
        return (
            len(self._pending) == count
            and not self._given
            and all(isinstance(job.handle, Queued) for job in self._pending)
        )

    def leave_queued(self, call: Call) -> None:
        """Leave the jobs that are left to the stream that the caller has named."""
        last = self._pending[-1].handle
        assert isinstance(last, Queued)
        leave_queued(call, last)
        self._pending.clear()

    def rest(self, messages: bool) -> bool:
        """Sleep until a worker is done, only briefly if messages are awaited; return False if no worker has a job."""
        if not self._given:
            return False
        start = self._traffic.clock()
        if not self._ready:
            with suppress(Empty):
                self._ready.append(self._finished.get(timeout=LOOK_S if messages else LONG_LOOK_S))
        self.rested_s += self._traffic.clock() - start
        return True

    def end(self) -> None:
        """Wait until no worker and no device uses the buffers of this run any more.

        Jobs that no worker has begun are skipped. A device has `PENDING_S` to end. Ctrl-C is raised after the wait.
        """
        if not (self._given or self._pending) or not (self._workers is None or self._workers.are_here):
            return
        interrupted: KeyboardInterrupt | None = None
        for job in self._given:
            job.is_wanted = False
        give_up = time.monotonic() + PENDING_S
        while not self._is_over(time.monotonic() < give_up):
            try:
                with suppress(Empty):
                    self._finished.get(timeout=LOOK_S)
            except KeyboardInterrupt as error:
                interrupted = error
        self._given.clear()
        self._ready.clear()
        self._pending.clear()
        if interrupted is not None:
            raise interrupted

    def _is_over(self, pending: bool) -> bool:
        """Return whether no worker has a job, and no device if `pending`."""
        if not all(job.is_over for job in self._given):
            return False
        return not pending or all(job.handle is None or job.handle.Test() for job in self._pending)

    def _go_on(self, job: _Job) -> None:
        if job.error is not None:
            try:
                raise job.error
            finally:
                job.error = None  # its traceback refers to this frame, which would be a cycle of references
        setattr(self._traffic, job.phase, getattr(self._traffic, job.phase) + job.seconds)
        if job.handle is None:
            job.then()
        else:
            self._pending.append(job)


def _do(
    job: _Job, clock: Callable[[], float], work: PieceWork, operands: tuple[object, ...], finished: SimpleQueue[_Job]
) -> None:
    start = clock()
    try:
        if job.is_wanted:
            job.handle = work(*operands)
    except BaseException as error:  # noqa: BLE001 - raised by the calling thread in `collect`
        job.error = error
    job.seconds, job.is_over = clock() - start, True
    finished.put(job)


def in_parts(
    call: Backoff,
    traffic: Traffic,
    phase: str,
    work: PieceWork,
    parts: Iterable[object],
    workers: Workers | None,
    messages: bool = False,
) -> Iterator[bool]:
    """Call `work` with each part of a vector, as part of a call; the parts are independent.

    The seconds are added to the number `phase` of `traffic`, "seconds_encoding" or "seconds_decoding". Workers work on
    several parts at a time; without them the calling thread works, which pays for short vectors. With `messages` the
    call has messages under way meanwhile.
    """
    observer = call.group.observer
    if observer is not None:
        work = observer.around_work(_KINDS[phase], work, lambda part: {"piece": 0})
    if workers is None:
        yield from _one_by_one(call, traffic, phase, work, parts)
        return
    jobs, waiting, under_way = Jobs(workers, traffic), deque(parts), [0]

    def ended() -> None:
        under_way[0] -= 1

    try:
        while waiting or under_way[0]:
            moved = jobs.collect()
            if waiting and not jobs.all_busy:
                under_way[0] += 1
                jobs.do(phase, ended, work, waiting.popleft())
                moved = True
            if not moved:
                call.rest_meanwhile = partial(jobs.rest, messages)
            yield moved
    finally:
        call.rest_meanwhile = None
        jobs.end()
    call.moved()
    call.waited_s -= jobs.rested_s  # this process computed meanwhile


def _one_by_one(
    call: Backoff, traffic: Traffic, phase: str, work: PieceWork, parts: Iterable[object]
) -> Iterator[bool]:
    # Without `Jobs`, whose bookkeeping would take longer than the work on short vectors.
    clock = traffic.clock
    for part in parts:
        start = clock()
        handle = work(part)
        setattr(traffic, phase, getattr(traffic, phase) + clock() - start)
        if handle is not None:
            yield from until(handle, call)
        yield True
