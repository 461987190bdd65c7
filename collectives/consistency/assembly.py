"""Whether all ranks make a communicator, so that MPI's blocking calls to come wait for nobody.

Every rank sends a byte straight to every other, so that what has come tells who is there. A rank whose arguments are
wrong says so in the same byte.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.missing_ranks import named
from collectives.errors import CollectiveMismatch, CollectiveTimeout
from collectives.progress.polling import wait

REFUSING_S = 0.5
_TAKES_PART, _REFUSES = 1, 2


def assemble(parent: MPI.Comm, timeout_s: float) -> None:
    """Wait until all ranks make a communicator.

    Raises
    ------
    CollectiveTimeout
        Names the ranks that have not come.
    CollectiveMismatch
        Names the ranks that refuse.
    """
    if parent.size == 1:
        return
    here = f"rank {parent.rank} of {parent.size}"
    request, came = _swap(parent, _TAKES_PART)

    def waiting() -> str:
        missing = [int(rank) for rank in np.flatnonzero(came == 0) if rank != parent.rank]
        nothing = f", nothing from {named(missing)} (look for one that stopped or took another branch)"
        return f"{here}: not all ranks make a communicator{nothing if missing else ''}"

    wait(request, timeout_s, waiting)
    refusing = [int(rank) for rank in np.flatnonzero(came == _REFUSES)]
    if refusing:
        raise CollectiveMismatch(
            f"{here}: {named(refusing)} made no communicator, because of an argument; the error there says of which"
        )


def refuse(parent: MPI.Comm) -> None:
    """Tell the others that this rank makes no communicator; waits a moment for those that come at the same time."""
    if parent.size > 1:
        with suppress(CollectiveTimeout):
            wait(_swap(parent, _REFUSES)[0], REFUSING_S, lambda: "not all ranks make a communicator")


def _swap(parent: MPI.Comm, mine: int) -> tuple[MPI.Request, NDArray[np.uint8]]:
    """Send a byte to every rank; what comes lands in the array, which is 0 where nothing has."""
    leaving, landing = np.full(parent.size, mine, np.uint8), np.zeros(parent.size, np.uint8)
    counts = np.ones(parent.size, np.int32)
    return parent.Ialltoallv([leaving, counts, MPI.BYTE], [landing, counts, MPI.BYTE]), landing
