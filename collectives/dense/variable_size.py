"""Payloads of any size by MPI's own collectives, part by part; steps of a call."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.execution.handle import Call, Steps

Bytes = NDArray[np.uint8]
# Received by a rank in one call of MPI, which counts in 32 bits. Only its end shows that anything moves: a part is to
# take far less than a timeout on a slow network, and on a fast one end before ranks that wait begin to sleep.
PART_BYTES = 64 << 20


def broadcast(call: Call, payload: Bytes, root: int) -> Steps:
    """Overwrite `payload`, as long on every rank, with rank `root`'s."""
    group = call.group
    yield from group.turn_of(call)
    for start in range(0, payload.size, PART_BYTES):
        part = payload[start : start + PART_BYTES]
        request = group.mpi_comm.Ibcast([part, part.size, MPI.BYTE], root)
        yield from group.await_request(
            call, request, lambda: f"{group.here}: nothing from rank {root} to be broadcast in {call.name()}"
        )


def all_gather_size(call: Call, size: int) -> Generator[bool, None, NDArray[np.int64]]:
    """Every rank's `size`, in rank order: what `all_gather` has to know."""
    group = call.group
    yield from group.turn_of(call)
    sizes = np.empty(group.mpi_comm.size, np.int64)
    request = group.mpi_comm.Iallgather(np.array([size], np.int64), sizes)
    yield from group.await_request(call, request, lambda: f"{group.here}: sizes are missing in {call.name()}")
    return sizes


def all_gather(call: Call, payload: Bytes, sizes: NDArray[np.int64], out: Bytes) -> Steps:
    """Overwrite `out` with every rank's payload, one behind the other in rank order; in several rounds if it is long.

    Parameters
    ----------
    call : Call
    payload : uint8[sizes[rank]]
    sizes : int64[ranks]
        Equal on all ranks.
    out : uint8[sum of the sizes]
        Shares no memory with `payload`.
    """
    group = call.group
    yield from group.turn_of(call)
    most = max(1, PART_BYTES // sizes.size)
    wholes = np.split(out, np.cumsum(sizes)[:-1])
    for start in range(0, int(sizes.max()), most):
        part, counts = slice(start, start + most), np.clip(sizes - start, 0, most)
        mine = payload[part]
        # every rank has its share of a round, so that no rank's long payload goes round while the others wait
        landing = out if counts.sum() == out.size else np.empty(counts.sum(), np.uint8)
        request = group.mpi_comm.Iallgatherv([mine, mine.size, MPI.BYTE], [landing, counts, MPI.BYTE])
        yield from group.await_request(call, request, lambda: f"{group.here}: payloads are missing in {call.name()}")
        if landing is not out:
            for landed, whole in zip(np.split(landing, np.cumsum(counts)[:-1]), wholes, strict=True):
                whole[part] = landed
