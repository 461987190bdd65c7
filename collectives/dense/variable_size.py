"""Payloads whose sizes differ from rank to rank. Sizes travel first, and every call polls up to a timeout."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.progress.polling import wait

Bytes = NDArray[np.uint8]
LARGEST = 1 << 30  # bytes that a rank sends, or receives, in one call of MPI


def all_gather(comm: MPI.Comm, payload: Bytes, timeout_s: float) -> list[Bytes]:
    """Every rank's payload, in rank order, on every rank; in several rounds where they are long.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    sizes = np.zeros(comm.size, np.int64)
    here = f"rank {comm.rank} of {comm.size}, all-gather"
    wait(comm.Iallgather(np.array([payload.size], np.int64), sizes), timeout_s, lambda: f"{here}: sizes are missing")
    gathered = [np.empty(size, np.uint8) for size in sizes]
    most = max(1, LARGEST // comm.size)
    for start in range(0, int(sizes.max()), most):
        part, counts = slice(start, start + most), np.clip(sizes - start, 0, most)
        mine, landing = payload[part], np.empty(counts.sum(), np.uint8)
        request = comm.Iallgatherv([mine, mine.size, MPI.BYTE], [landing, counts, MPI.BYTE])
        wait(request, timeout_s, lambda: f"{here}: payloads are missing")
        for landed, whole in zip(np.split(landing, np.cumsum(counts)[:-1]), gathered, strict=True):
            whole[part] = landed
    return gathered
