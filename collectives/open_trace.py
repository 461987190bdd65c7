"""Beginning the traces of all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

from collectives.consistency.call_check import gather_texts
from collectives.progress.polling import wait
from collectives.trace.recorder import Trace, compare_clocks


def open_trace(comm: MPI.Comm, folder: str | Path, timeout_s: float, close: Callable[[], None]) -> Trace:
    """Record everything that a new communicator does from now on; collective. `close` is called if that fails.

    Raises
    ------
    OSError
        A rank cannot write to the folder; on every rank.
    CollectiveTimeout, PeerFailure
    """
    here = f"rank {comm.rank} of {comm.size}"
    told = f"{here}: not all ranks open a trace; pass trace= on every rank or on none"
    wait(comm.Ibarrier(), timeout_s, lambda: told)
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
    trace.readings = [compare_clocks(comm, trace.clock, timeout_s)]
    beginning = np.array([trace.clock(), time.time()])
    wait(comm.Ibcast(beginning, 0), timeout_s, lambda: f"{here}: rank 0 does not begin the trace")
    trace.origin, trace.run = beginning.tolist()
    return trace
