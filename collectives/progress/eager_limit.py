"""How long messages between nodes may be so that MPI sends them eagerly: at once, with no hand-shake before."""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI

from collectives.progress.polling import wait

EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"  # where Open MPI is told its limit for TCP
USUAL_BYTES = 65_536
HEADROOM = 8_192  # a message's headers count too
LEAST_BYTES, MOST_BYTES = 8_192, 262_144  # shorter pieces cost more calls than they spare, longer ones overlap less


def piece_bytes(comm: MPI.Comm, timeout_s: float) -> int:
    """Longest message that every rank sends eagerly, from the environment of its process; collective.

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
