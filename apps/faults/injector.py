"""The injector: it watches the steps of one rank, and makes the rank's faults happen in their phases."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Timer
from typing import Any, BinaryIO

from mpi4py import MPI

from apps.faults.fault import Fault, Kind, Phase
from apps.faults.full_disk import full_disk, replaced
from apps.faults.messages import WatchedComm
from collectives import atomic_file
from collectives.consistency.recursive_doubling import rounds_of
from collectives.execution.call import Call, Steps
from collectives.recovery.commit_rule import is_settled
from collectives.recovery.regroup import Regroup
from mpicomp.aggregator.base import Aggregator


class Injector:
    """The faults of one rank.

    A program makes its communicator from ``watch(MPI.COMM_WORLD)`` within `installed`, and calls `begin` and `end`
    around each step and `checkpoint` around the writing of states. A fault whose phase the rank does not pass happens
    in the next phase that it passes.

    Parameters
    ----------
    faults : iterable of Fault
        Those of all ranks.
    rank : int
        This rank in COMM_WORLD.
    on_fault : callable, optional
        Called with each fault right before it happens.

    Examples
    --------
    >>> import numpy as np
    >>> from mpi4py import MPI
    >>> import mpicomp
    >>> from apps.faults import Injector, slow_at
    >>> faults = Injector([slow_at(0, 1, "between-steps", 0.01)], MPI.COMM_WORLD.rank, on_fault=print)
    >>> with faults.installed(), mpicomp.Communicator(faults.watch(MPI.COMM_WORLD)) as comm:
    ...     for step in range(3):
    ...         faults.begin(step)
    ...         total = comm.allreduce(np.ones(10))
    ...         faults.end()
    slow:0:1:between-steps:0.01
    """

    def __init__(self, faults: Iterable[Fault], rank: int, on_fault: Callable[[Fault], None] = lambda fault: None):
        own = [fault for fault in faults if fault.rank == rank]
        self._ahead = sorted(own, key=lambda fault: (fault.step, fault.phase.place))
        self._due: list[Fault] = []  # of this step, or left over from an earlier one
        self._on_fault = on_fault
        self._n_sent = self._n_before_barrier = 0  # messages of this step; of the step before, up to its barrier
        self._phase = Phase.BETWEEN_STEPS

    def watch(self, comm: MPI.Intracomm) -> MPI.Intracomm:
        """Return the communicator whose messages are counted, for `Communicator`."""
        return WatchedComm.of(comm, self)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the barriers and residuals of all communicators and aggregators of this process."""
        settled, assemble = Regroup.settled, Aggregator._assemble

        def watch_barrier(regroup: Regroup, call: Call) -> Steps:
            if not is_settled(call):
                self.reach(Phase.BEFORE_BARRIER)
            yield from settled(regroup, call)
            self.reach(Phase.AFTER_BARRIER)

        def watch_residual(aggregator: Aggregator) -> None:
            assemble(aggregator)
            driver: Any = aggregator.driver
            commit = driver.commit

            def commit_and_reach() -> None:
                commit()
                self.reach(Phase.RESIDUAL)

            driver.commit = commit_and_reach

        with ExitStack() as stack:
            stack.enter_context(replaced(Regroup, "settled", watch_barrier))
            stack.enter_context(replaced(Aggregator, "_assemble", watch_residual))
            yield

    # The steps of the program ----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Enter a step."""
        self.reach(Phase.CHECKPOINT)  # the program writes none
        self._phase, self._n_sent = Phase.BEFORE_CALL, 0
        while self._ahead and self._ahead[0].step <= step:
            self._due.append(self._ahead.pop(0))
        self.reach(Phase.BEFORE_CALL)

    def end(self) -> None:
        """Leave a step."""
        self.reach(Phase.BETWEEN_STEPS)

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Let faults of checkpoints happen while this block writes states."""
        full = next((fault for fault in self._due if fault.kind is Kind.DISK_FULL), None)
        flush = atomic_file._flush

        def flush_and_reach(file: BinaryIO) -> None:
            flush(file)
            self.reach(Phase.CHECKPOINT)

        with ExitStack() as stack:
            stack.enter_context(replaced(atomic_file, "_flush", flush_and_reach))
            if full is not None:
                self._due.remove(full)
                self._on_fault(full)
                stack.enter_context(full_disk())
            yield
        self.reach(Phase.CHECKPOINT)

    # Faults ----------------------------------------------------------------------------------------------------------

    def reach(self, phase: Phase) -> None:
        """Let the faults happen that are due in this phase or were in an earlier one."""
        if self._phase.place < phase.place:
            if self._phase.place < Phase.BEFORE_BARRIER.place <= phase.place:
                self._n_before_barrier = self._n_sent
            self._phase = phase
        for fault in [fault for fault in self._due if fault.phase.place <= phase.place]:
            if fault.kind in _ACTIONS or fault.kind is Kind.LATE_KILL:
                self._due.remove(fault)
                if fault.kind is Kind.LATE_KILL:
                    _kill_later(fault, self._on_fault)
                    continue
                self._on_fault(fault)
                _ACTIONS[fault.kind](fault)

    def sending(self, comm: MPI.Comm, nbytes: int) -> int | None:
        """Count a message; return the number of a bit to flip in it, or None."""
        self._n_sent += 1
        if self._phase.place < Phase.BEFORE_BARRIER.place:
            n_check = sum(one.sends for one in rounds_of(comm.rank, comm.size))
            middle = max(n_check + 2, (n_check + self._n_before_barrier + 1) // 2)
            phase = Phase.CALL_CHECK if self._n_sent <= n_check else Phase.FIRST_MESSAGE
            phase = Phase.MIDDLE if self._n_sent >= middle else phase
            self._phase = max(self._phase, phase, key=lambda one: one.place)
        for fault in self._due:
            if fault.kind is Kind.CORRUPT and nbytes and fault.phase.place <= self._phase.place:
                self._due.remove(fault)
                self._on_fault(fault)
                return fault.bit
        return None

    def sent(self) -> None:
        """Let the faults happen that wait for the message that has been sent."""
        self.reach(self._phase)


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_later(fault: Fault, on_fault: Callable[[Fault], None]) -> None:
    def die() -> None:
        on_fault(fault)
        _kill(fault)

    timer = Timer(fault.seconds, die)
    timer.daemon = True
    timer.start()


def _stop(fault: Fault) -> None:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {fault.seconds}; kill -CONT {pid}"], stdin=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


def _sleep(fault: Fault) -> None:
    time.sleep(fault.seconds)


_ACTIONS: dict[Kind, Callable[[Fault], None]] = {Kind.KILL: _kill, Kind.STOP: _stop, Kind.SLOW: _sleep}
