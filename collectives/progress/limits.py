"""Timeouts of ranks, and the length of messages that MPI sends without a hand-shake."""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from collectives.progress.polling import wait

SILENCE_S = 60.0  # default within a collective, where all ranks are at work
ARRIVAL_S = 1800.0  # default for a rank that evaluates or saves while the others wait in their next call
EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"  # environment variable with Open MPI's limit for TCP
USUAL_BYTES = 65_536
HEADROOM = 8_192  # the limit includes a message's headers
LEAST_BYTES, MOST_BYTES = 8_192, 262_144  # shorter pieces cost more calls than they spare, longer ones overlap less


def timeouts(timeout: float | None, arrival_timeout: float | None) -> tuple[float, float]:
    """Return both timeouts of a communicator, in seconds: the argument, else the environment's, else the default.

    Raises
    ------
    TypeError, ValueError
        A timeout is no positive number; the message names the argument or variable.
    """
    silence_s = _seconds("timeout", timeout, SILENCE_S)
    return silence_s, _seconds("arrival_timeout", arrival_timeout, max(ARRIVAL_S, silence_s))


def _seconds(name: str, given: float | None, default: float) -> float:
    source, value = name, given if given is not None else ""
    if given is None:
        source = f"MPICOMP_{name.upper()}"
        value = os.environ.get(source) or default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise _error(TypeError if given is not None else ValueError, source, value) from None
    if not seconds > 0:
        raise _error(ValueError, source, value)
    return seconds


def _error(kind: type[Exception], source: str, value: object) -> Exception:
    return kind(f"{source} is {value!r}: it must be a positive number of seconds, such as 60 or inf")


def eager_piece_bytes(comm: MPI.Comm, timeout_s: float) -> int:
    """Return the length of the longest message between nodes that all ranks send eagerly; collective.

    Each rank reads the environment of its process.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    limit = os.environ.get(EAGER_LIMIT, "")
    mine = int(limit) - HEADROOM if limit.isdecimal() else USUAL_BYTES - HEADROOM
    least = np.empty(1, np.int64)
    request = comm.Iallreduce(np.array([min(MOST_BYTES, max(LEAST_BYTES, mine))]), least, MPI.MIN)
    wait(request, timeout_s, lambda: f"rank {comm.rank} of {comm.size}: not all ranks make a communicator")
    return int(least[0])
