"""Opening of a trace, on all ranks or on none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from collectives.consistency.descriptions import gather_texts
from collectives.progress.polling import wait
from collectives.trace.clocks import compare_clocks
from collectives.trace.flight_recorder import RecordedGroup, recorder_here
from collectives.trace.recorder import Trace

if TYPE_CHECKING:
    from collectives.group.calls import Calls


def open_history(key: str, rank: int, members: Sequence[int], calls: Calls) -> RecordedGroup:
    """Return the history of a new group's calls, in the flight recorder of this process."""
    return RecordedGroup(recorder_here(), key, rank, members, calls)


def opener_of(folder: str | Path | None) -> Callable[..., Trace] | None:
    """Return the function that opens a trace in a folder; None without one."""
    return None if folder is None else partial(open_trace, folder)


def open_trace(folder: str | Path, comm: MPI.Comm, timeout_s: float, link: str, close: Callable[[], None]) -> Trace:
    """Begin to record all calls of a new communicator; OSError on every rank if one cannot write there. Collective."""
    here = f"rank {comm.rank} of {comm.size}"
    missing = f"{here}: not all ranks open a trace; pass trace= on every rank or on none"
    wait(comm.Ibarrier(), timeout_s, lambda: missing)
    trace, problem = None, ""
    try:
        trace = Trace(Path(folder), comm.rank, comm.size)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        problem = f"{here}, trace={str(folder)!r}: {cause}; name a folder that every rank can write, for this alone"
    problem = next(filter(None, gather_texts(comm, problem, timeout_s)), "")
    if trace is None or problem:
        if trace is not None:
            trace.discard()
        close()
        raise OSError(problem)
    # the link that messages are held back by, in words
    trace.link, trace.readings = link, [compare_clocks(comm, trace.clock, timeout_s)]
    beginning = np.array([trace.clock(), time.time()])
    wait(comm.Ibcast(beginning, 0), timeout_s, lambda: f"{here}: rank 0 does not begin the trace")
    trace.origin, trace.run = beginning.tolist()
    return trace
