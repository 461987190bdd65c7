"""Payloads whose sizes differ from rank to rank: all-gather, all-to-all, broadcast.

Sizes travel first. Nothing here merges; every call polls up to the communicator's timeout. Payloads longer than
`LARGEST` go in several rounds, in each of which every rank sends the next part of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.progress.polling import wait
from collectives.trace.traffic import Traffic

Bytes = NDArray[np.uint8]
LARGEST = 1 << 30  # bytes that a rank sends, or receives, in one call of MPI


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
    gathered = [np.empty(size, np.uint8) for size in sizes]
    for part in _parts(int(sizes.max()), comm.size):
        counts = _lengths(sizes, part)
        mine, landing = payload[part], np.empty(counts.sum(), np.uint8)
        request = comm.Iallgatherv([mine, mine.size, MPI.BYTE], [landing, counts, MPI.BYTE])
        wait(request, timeout_s, lambda: f"{here}: payloads are missing")
        _deal_out(landing, part, counts, gathered)
    _count(traffic, (comm.size - 1) * (8 + payload.size), 2 * (comm.size - 1))
    return gathered


def _parts(longest: int, ranks: int) -> Iterator[slice]:
    """What travels of every payload in each round, none being longer than `longest`."""
    most = max(1, LARGEST // ranks)
    return (slice(start, start + most) for start in range(0, longest, most))


def _lengths(sizes: NDArray[np.int64], part: slice) -> NDArray[np.int64]:
    """How long that part is of payloads of these sizes."""
    lengths: NDArray[np.int64] = np.clip(sizes - part.start, 0, part.stop - part.start)
    return lengths


def _deal_out(landing: Bytes, part: slice, counts: NDArray[np.int64], payloads: list[Bytes]) -> None:
    """Put one round's bytes where they belong."""
    for landed, whole in zip(np.split(landing, np.cumsum(counts)[:-1]), payloads, strict=True):
        whole[part] = landed


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
    longest = np.zeros(1, np.int64)  # all ranks must make as many rounds
    request = comm.Iallreduce(np.array([sizes_out.max(initial=0)], np.int64), longest, MPI.MAX)
    wait(request, timeout_s, lambda: f"{here}: sizes are missing")
    received = [np.empty(size, np.uint8) for size in sizes_in]
    for part in _parts(int(longest[0]), comm.size):
        counts_out, counts_in = _lengths(sizes_out, part), _lengths(sizes_in, part)
        outgoing = np.concatenate([payload[part] for payload in payloads])
        landing = np.empty(counts_in.sum(), np.uint8)
        request = comm.Ialltoallv([outgoing, counts_out, MPI.BYTE], [landing, counts_in, MPI.BYTE])
        wait(request, timeout_s, lambda: f"{here}: payloads are missing")
        _deal_out(landing, part, counts_in, received)
    _count(traffic, 8 * (comm.size - 1) + int(sizes_out.sum() - sizes_out[comm.rank]), 2 * (comm.size - 1))
    return received


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
