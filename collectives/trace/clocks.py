"""Comparison of the ranks' clocks, by ping-pongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives import tags
from collectives.progress.polling import wait

TAG = tags.CLOCKS.start
ROUNDS = 48


class Reading(NamedTuple):
    """Comparison of this rank's clock with rank 0's, in seconds."""

    at: float  # time of this rank's clock
    offset: float  # rank 0's clock minus this rank's
    round_trip: float  # time of the fastest ping-pong; half of it limits the error of the offset


def compare_clocks(comm: MPI.Comm, clock: Callable[[], float], timeout_s: float) -> Reading:
    """Compare every rank's `clock`, in seconds, with rank 0's by ping-pongs, one rank after the other; collective."""

    def wait_for(request: MPI.Request, peer: int) -> None:
        wait(request, timeout_s, lambda: f"rank {comm.rank} of {comm.size}: rank {peer} does not compare clocks")

    ping, pong = np.zeros(1), np.zeros(1)
    if comm.rank == 0:
        for peer in range(1, comm.size):
            for _ in range(ROUNDS):
                wait_for(comm.Irecv(ping, peer, TAG), peer)
                pong[0] = clock()
                wait_for(comm.Isend(pong, peer, TAG), peer)
        return Reading(clock(), 0.0, 0.0)
    best = Reading(0.0, 0.0, np.inf)
    for _ in range(ROUNDS):
        receive = comm.Irecv(pong, 0, TAG)
        before = clock()
        send = comm.Isend(ping, 0, TAG)
        wait_for(receive, 0)
        after = clock()
        wait_for(send, 0)
        if after - before < best.round_trip:
            middle = (before + after) / 2
            best = Reading(middle, float(pong[0]) - middle, after - before)
    return best


def offset_at(readings: list[Reading], at: float) -> float:
    """Return the offset at a time of this rank's clock: linear between two readings, constant outside."""
    first, last = readings[0], readings[-1]
    if at <= first.at or last.at <= first.at:
        return first.offset
    part = min(1.0, (at - first.at) / (last.at - first.at))
    return first.offset + part * (last.offset - first.offset)
