"""The communicator that records its calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.agreement import gather_texts
from collectives.communicator import Communicator, Op
from collectives.handle import Handle
from collectives.trace.clock import compare
from collectives.trace.recorder import Trace
from collectives.traffic import Traffic
from collectives.waiting import wait

GRACE_S = 0.5  # that ranks which gave up leave each other for writing, as one of them may end the job


def open_trace(comm: Communicator, folder: str | Path) -> None:
    """Record everything that a new communicator does from now on; collective.

    Raises
    ------
    OSError
        A rank cannot write to the folder; on every rank.
    CollectiveTimeout, PeerFailure
    """
    here = f"rank {comm.rank} of {comm.size}"
    arrived = comm.mpi_comm.Ibarrier()
    wait(arrived, comm.timeout, lambda: f"{here}: not all ranks open a trace; pass trace= on every rank or on none")
    trace, problem = None, ""
    try:
        trace = Trace(Path(folder), comm.rank, comm.size)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        problem = f"{here}, trace={str(folder)!r}: {cause}; name a folder that every rank can write, for this alone"
    problem = next(filter(None, gather_texts(comm.mpi_comm, problem, comm.timeout)), "")
    if trace is None or problem:
        if trace is not None:
            trace.discard()
        comm.close()
        raise OSError(problem)
    trace.readings = [compare(comm.mpi_comm, trace.clock, comm.timeout)]
    beginning = np.array([trace.clock(), time.time()])
    wait(comm.mpi_comm.Ibcast(beginning, 0), comm.timeout, lambda: f"{here}: rank 0 does not begin the trace")
    trace.origin, trace.run = beginning.tolist()
    comm.trace = trace
    comm.__class__ = TracedCommunicator


class TracedHandle(Handle):
    """A handle whose waiting is recorded."""

    trace: Trace | None = None

    def wait(self) -> Any:
        """See `Handle.wait`."""
        if self.trace is None:
            return super().wait()
        with self.trace.span("wait", "wait for iallreduce"):
            return super().wait()


class TracedCommunicator(Communicator):
    """A communicator with a trace: what `open_trace` makes of one."""

    _handle = TracedHandle

    @property
    def _recorder(self) -> Trace:
        assert self.trace is not None
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Communicator`."""
        super().__exit__(kind, error, trace)
        self._recorder.save()

    def close(self) -> None:
        """See `Communicator.close`; clocks are compared once more, and the trace is written.

        Raises
        ------
        OSError
            It cannot be written.
        """
        try:
            if not self._broken:
                self._settle()
                self._recorder.readings.append(compare(self.mpi_comm, self._recorder.clock, self.timeout))
            super().close()
        except BaseException as error:
            self.abandon(error)
            raise
        self._recorder.write()

    def abandon(self, error: BaseException, *alive: object) -> None:
        """See `Communicator.abandon`; the trace is written before anybody can end the job for it."""
        first = not self._broken
        try:
            super().abandon(error, *alive)
        finally:
            if first:
                start = time.perf_counter()
                self._recorder.save()
                time.sleep(max(GRACE_S, time.perf_counter() - start))

    def agree(
        self,
        mark: int,
        describe: Callable[[], str],
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """See `Communicator.agree`."""
        trace = self._recorder
        if meanwhile is not None:
            meanwhile = trace.around("prepare", meanwhile)
        nbytes = {} if values is None else {"bytes": values.nbytes}
        with trace.span("check", "agreement" if values is None else "agreement and sum", **nbytes):
            super().agree(mark, describe, traffic, values, sums, meanwhile)

    def wait(self, request: MPI.Request, describe: Callable[[], str], name: str = "wait") -> None:
        """See `Communicator.wait`."""
        with self._recorder.span("wait", name):
            super().wait(request, describe, name)

    def _settle(self) -> None:
        if not self._in_flight:
            super()._settle()
            return
        with self._recorder.span("wait", "finish iallreduces"):
            super()._settle()

    def allreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Any:
        """See `Communicator.allreduce`."""
        with self._recorder.span("call", "allreduce", op=op, bytes=getattr(x, "nbytes", None)):
            return super().allreduce(x, op, out)

    def iallreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Handle:
        """See `Communicator.iallreduce`."""
        with self._recorder.span("call", "iallreduce", op=op, bytes=getattr(x, "nbytes", None)):
            handle = super().iallreduce(x, op, out)
        assert isinstance(handle, TracedHandle)
        handle.trace = self.trace
        return handle

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """See `Communicator.broadcast`."""
        with self._recorder.span("call", "broadcast", root=root, bytes=getattr(x, "nbytes", None)):
            return super().broadcast(x, root)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        with self._recorder.span("call", "barrier"):
            super().barrier()
