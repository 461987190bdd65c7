"""Payloads whose sizes differ from rank to rank: all-gather, all-to-all, broadcast.

Sizes travel first. Nothing here merges; every call polls up to the communicator's timeout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.traffic import Traffic
from collectives.waiting import wait

Bytes = NDArray[np.uint8]
LARGEST = 1 << 30  # bytes in one message


def _count(traffic: Traffic | None, nbytes: int, messages: int) -> None:
    if traffic is not None:
        traffic.bytes_sent += nbytes
        traffic.messages += messages


def all_gather(comm: MPI.Comm, payload: Bytes, timeout_s: float, traffic: Traffic | None = None) -> list[Bytes]:
    """Every rank's payload, in rank order, on every rank.

    Parameters
    ----------
    comm : MPI.Comm
    payload : uint8[any length]
    timeout_s : float
    traffic : Traffic, optional
        Counted into: the payload once per peer.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    sizes = np.zeros(comm.size, np.int64)
    here = f"rank {comm.rank} of {comm.size}, all-gather"
    wait(comm.Iallgather(np.array([payload.size], np.int64), sizes), timeout_s, lambda: f"{here}: sizes are missing")
    everything = np.empty(int(sizes.sum()), np.uint8)
    if everything.size:
        request = comm.Iallgatherv([payload, payload.size, MPI.BYTE], [everything, sizes, MPI.BYTE])
        wait(request, timeout_s, lambda: f"{here}: payloads are missing")
    _count(traffic, (comm.size - 1) * (8 + payload.size), 2 * (comm.size - 1))
    return np.split(everything, np.cumsum(sizes)[:-1])


def all_to_all(
    comm: MPI.Comm, payloads: Sequence[Bytes], timeout_s: float, traffic: Traffic | None = None
) -> list[Bytes]:
    """Send `payloads[r]` to rank r; returns what each rank sent here, in rank order.

    Parameters
    ----------
    comm : MPI.Comm
    payloads : sequence of uint8 arrays
        One per rank, of any lengths.
    timeout_s : float
    traffic : Traffic, optional
        Counted into: everything but the part for this rank itself.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    sizes_out = np.array([p.size for p in payloads], np.int64)
    sizes_in = np.zeros(comm.size, np.int64)
    here = f"rank {comm.rank} of {comm.size}, all-to-all"
    wait(comm.Ialltoall(sizes_out, sizes_in), timeout_s, lambda: f"{here}: sizes are missing")
    outgoing = np.concatenate(payloads) if payloads else np.empty(0, np.uint8)
    incoming = np.empty(int(sizes_in.sum()), np.uint8)
    request = comm.Ialltoallv([outgoing, sizes_out, MPI.BYTE], [incoming, sizes_in, MPI.BYTE])
    wait(request, timeout_s, lambda: f"{here}: payloads are missing")
    _count(traffic, 8 * (comm.size - 1) + int(sizes_out.sum() - sizes_out[comm.rank]), 2 * (comm.size - 1))
    return np.split(incoming, np.cumsum(sizes_in)[:-1])


def broadcast(comm: MPI.Comm, payload: Bytes, root: int, timeout_s: float) -> None:
    """Overwrite `payload`, of equal length everywhere, with rank `root`'s.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    for start in range(0, payload.size, LARGEST):
        part = payload[start : start + LARGEST]
        request = comm.Ibcast([part, part.size, MPI.BYTE], root)
        wait(request, timeout_s, lambda: f"rank {comm.rank} of {comm.size}: nothing from rank {root} to be broadcast")
