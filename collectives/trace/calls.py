"""The communicator that records its calls."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from collectives.communicator import Communicator
from collectives.consistency.call_check import gather_texts
from collectives.execution.handle import Handle
from collectives.progress.polling import wait
from collectives.trace.clock import compare
from collectives.trace.recorder import Span, Trace

GRACE_S = 0.5  # that ranks which gave up leave each other for writing, as one of them may end the job

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


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
    comm._handle = partial(TracedHandle, trace)
    comm.__class__ = TracedCommunicator


class TracedHandle(Handle):
    """A handle whose waiting is recorded."""

    def __init__(self, trace: Trace, *parts: Any) -> None:
        super().__init__(*parts)
        self._trace = trace

    def wait(self) -> Any:
        """See `Handle.wait`."""
        with self._trace.span("wait", "wait for iallreduce"):
            return super().wait()


def within(
    method: Callable[_P, _Result], context: Callable[[Trace, dict[str, Any]], AbstractContextManager[None]]
) -> Callable[_P, _Result]:
    """A communicator's method, called within what `context` makes of the trace and of its arguments by name.

    `context` may change them.
    """
    signature = inspect.signature(method)

    @wraps(method)
    def traced(*args: _P.args, **named: _P.kwargs) -> _Result:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        with context(given["self"].trace, given):
            return method(**given)  # type: ignore[call-arg]

    return traced


def _call(name: str) -> Callable[[Trace, dict[str, Any]], Span]:
    """What records a call, with those of its arguments that say how large it is."""

    def context(trace: Trace, given: dict[str, Any]) -> Span:
        told: dict[str, Any] = {key: given[key] for key in ("op", "root") if key in given}
        if "x" in given:
            told["bytes"] = getattr(given["x"], "nbytes", None)
        return trace.span("call", name, **told)

    return context


def _check(trace: Trace, given: dict[str, Any]) -> Span:
    if given["meanwhile"] is not None:
        given["meanwhile"] = trace.around("prepare", given["meanwhile"])
    if given["values"] is None:
        return trace.span("check", "agreement")
    return trace.span("check", "agreement and sum", bytes=given["values"].nbytes)


class TracedCommunicator(Communicator):
    """A communicator with a trace: what `open_trace` makes of one."""

    agree = within(Communicator.agree, _check)
    wait = within(Communicator.wait, lambda trace, given: trace.span("wait", given["name"]))
    allreduce = within(Communicator.allreduce, _call("allreduce"))
    iallreduce = within(Communicator.iallreduce, _call("iallreduce"))
    broadcast = within(Communicator.broadcast, _call("broadcast"))
    barrier = within(Communicator.barrier, _call("barrier"))

    @property
    def _recorder(self) -> Trace:
        assert self.trace is not None
        return self.trace

    def _settle(self) -> None:
        with self._recorder.span("wait", "finish iallreduces") if self._in_flight else nullcontext():
            super()._settle()

    def _given_up(self) -> None:
        start = time.perf_counter()
        self._recorder.save()
        time.sleep(max(GRACE_S, time.perf_counter() - start))

    def __exit__(self, *error: Any) -> None:
        """See `Communicator`."""
        super().__exit__(*error)
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
            self.abort(error)
            raise
        self._recorder.write()
