"""Measurement of a communicator's network, by messages over it."""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.communicator import Communicator
from collectives.cost.link import LinkModel
from collectives.errors import DamagedMessage

IN_FLIGHT = 8
STREAMS = 3  # the middle one of them counts
LEAST_S = 0.1  # how long a stream takes at least
MOST_MESSAGES = 1 << 14
ROUND_TRIPS = 60
SLOWER = 1.5  # so many times slower, and a link is another kind of link


def measure_network(comm: Communicator) -> LinkModel:
    """Return latency, bandwidth and groups of the ranks' network; collective, a second or two, the same on every rank.

    Every rank sends to a neighbour and receives from another at the same time, as in a ring; the slowest one counts.
    Groups of neighbouring ranks, such as racks, are found by their slower way to each other. Without such groups, nodes
    of equally many ranks are the groups.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    ValueError
        There is one rank.
    """
    size = comm.size
    if size == 1:
        raise ValueError("one rank has no network to measure: start more of them with mpirun")
    # Look for the group width, neither 1 nor all ranks, within which links are fast and between which they are slow.
    widths = [width for width in range(2, size) if size % width == 0]
    within = {width: _seconds_a_message(comm, _inside(comm.rank, width)) for width in (*widths, size)}
    across = {width: _seconds_a_message(comm, _beyond(comm.rank, width, size)) for width in widths}
    fast = min(within.values())

    def fall_apart(inside_s: float, beyond_s: float) -> bool:
        return inside_s <= SLOWER * fast and beyond_s > SLOWER * inside_s

    groups = []
    for width in widths:
        if fall_apart(within[width], across[width]):  # once more: a rank that had to wait looks like a slow way
            inside_s = _seconds_a_message(comm, _inside(comm.rank, width))
            beyond_s = _seconds_a_message(comm, _beyond(comm.rank, width, size))
            if fall_apart(inside_s, beyond_s):
                groups.append(width)
            within[width], across[width] = min(within[width], inside_s), min(across[width], beyond_s)
    each = comm.layout.ranks_of_each
    if not groups and each is not None and 1 < each < size:
        groups.append(each)  # nodes are groups, even if other work on the machine makes their memory look slow
    width = max(groups, default=size)
    nbytes = comm.routes.packed_piece_bytes()
    latency_s, bandwidth = _latency(comm, _inside(comm.rank, width)), nbytes / within[width]
    if not groups:
        return LinkModel(latency_s, bandwidth)
    between_s = _latency(comm, _beyond(comm.rank, width, size))
    uplink = width * nbytes / across[width]
    return LinkModel(latency_s, bandwidth, group_size=width, between_latency_s=between_s, uplink_bytes_s=uplink)


def measure_latency(comm: Communicator) -> float:
    """Return the seconds of a step in which every rank sends a few bytes to the next; collective, with one result."""
    return _latency(comm, _inside(comm.rank, comm.size))


def _inside(rank: int, width: int) -> tuple[int, int]:
    """Return the neighbours to send to and to receive from, in a ring of `width` ranks."""
    first, place = rank - rank % width, rank % width
    return first + (place + 1) % width, first + (place - 1) % width


def _beyond(rank: int, width: int, size: int) -> tuple[int, int]:
    """Return the ranks in the same place of the next group and of the one before."""
    return (rank + width) % size, (rank - width) % size


def _seconds_a_message(comm: Communicator, peers: tuple[int, int]) -> float:
    """Return the seconds of a message in a long stream of them, on the slowest rank."""
    count = 2 * IN_FLIGHT
    total_s, each_s = _stream(comm, peers, count)
    while total_s < LEAST_S and count < MOST_MESSAGES:
        count = min(MOST_MESSAGES, int(count * min(8.0, 1.5 * LEAST_S / total_s)) + 1)
        total_s, each_s = _stream(comm, peers, count)
    return float(np.median([each_s, *(_stream(comm, peers, count)[1] for _ in range(STREAMS - 1))]))


def _stream(comm: Communicator, peers: tuple[int, int], count: int) -> tuple[float, float]:
    """Return the seconds for `count` messages each way, a few at a time; and for each, once the stream flows.

    A link may pass a burst at once at first; that is over after a quarter of the messages.
    """
    to, source = peers
    nbytes = comm.routes.packed_piece_bytes()
    out, into = np.zeros(nbytes, np.uint8), np.empty((IN_FLIGHT, nbytes), np.uint8)
    tag, mpi_comm = comm.calls.next_tag(), comm.mpi_comm
    receives: deque[MPI.Request] = deque()
    sends: deque[MPI.Request] = deque()
    arrivals = np.empty(count)
    comm.barrier()
    start = time.perf_counter()
    for message in range(count + IN_FLIGHT):
        if message >= IN_FLIGHT:
            _wait(comm, receives.popleft(), peers)
            arrivals[message - IN_FLIGHT] = time.perf_counter() - start
            _wait(comm, sends.popleft(), peers)
        if message < count:
            receives.append(mpi_comm.Irecv(into[message % IN_FLIGHT], source, tag))
            sends.append(mpi_comm.Isend(out, to, tag))
    flowing = count // 4
    mine = float(arrivals[-1]), float(arrivals[-1] - arrivals[flowing]) / (count - 1 - flowing)
    return _slowest(comm, mine[0]), max(1e-9, _slowest(comm, mine[1]))


def _latency(comm: Communicator, peers: tuple[int, int]) -> float:
    """Return the median seconds of a step in which every rank sends and receives a few bytes, on the slowest rank."""
    to, source = peers
    out, into = np.zeros(8, np.uint8), np.empty(8, np.uint8)
    tag, mpi_comm = comm.calls.next_tag(), comm.mpi_comm
    steps = np.zeros(ROUND_TRIPS)
    comm.barrier()
    for step in range(ROUND_TRIPS):
        start = time.perf_counter()
        requests = mpi_comm.Irecv(into, source, tag), mpi_comm.Isend(out, to, tag)
        for request in requests:
            _wait(comm, request, peers)
        steps[step] = time.perf_counter() - start
    return _slowest(comm, float(np.median(steps)))


def _wait(comm: Communicator, request: MPI.Request, peers: tuple[int, int]) -> None:
    try:
        for _ in range(64):
            if request.Test():
                return
            os.sched_yield()
    except DamagedMessage as error:
        raise comm.ending.abort(error) from None
    comm.wait(
        request, lambda: f"rank {comm.rank} of {comm.size}: no answer from ranks {peers} while links are measured"
    )


def _slowest(comm: Communicator, seconds: float) -> float:
    everyones: NDArray[np.float64] = np.empty(comm.size)
    request = comm.mpi_comm.Iallgather(np.array([seconds]), everyones)
    comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: the ranks' timings do not arrive")
    return float(everyones.max())
