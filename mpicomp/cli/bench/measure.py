"""Timing two subjects in turn, so that whatever else the machine does meets both."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import CollectiveTimeout, Communicator
from collectives.trace.traffic import COSTS
from mpicomp.cli.bench.subjects import Subject

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """One vector length.

    Attributes
    ----------
    seconds : float64[repeats]
        Of each timed call, on the slowest rank.
    baseline_seconds : float64[repeats] or None
        Likewise.
    cost : dict of float
        Fields of `Traffic` for one call, as the mean over calls and ranks.
    """

    seconds: Seconds
    baseline_seconds: Seconds | None
    cost: dict[str, float]


def measure(
    comm: Communicator,
    subject: Subject,
    other: Subject | None,
    x: NDArray[Any],
    out: NDArray[Any],
    repeats: int,
    warmup: int,
) -> Measurement:
    """Time both subjects alternately, each call behind a barrier of its own; collective.

    Parameters
    ----------
    comm : Communicator
    subject, other : Subject
        What is timed, and the baseline.
    x, out : ndarray[n]
        `out` is overwritten by both.
    repeats, warmup : int
        Calls of each that are timed, and calls before.

    Raises
    ------
    CollectiveError
    """
    sides = [subject] if other is None else [subject, other]
    mine = np.zeros((len(sides), repeats))
    before = subject.total()
    for repeat in range(-warmup, repeats):
        if repeat == 0:
            before = subject.total()
        for row, side in zip(mine, sides, strict=True):
            line_up(comm)
            start = time.perf_counter()
            side(x, out)
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                row[repeat] = elapsed
    slowest = gather(comm, mine).max(axis=0)
    after = subject.total()
    spent = [(getattr(after, name) - getattr(before, name)) / repeats for name in COSTS]
    cost = dict(zip(COSTS, gather(comm, np.array(spent, np.float64)).mean(axis=0).tolist(), strict=True))
    return Measurement(slowest[0], slowest[1] if other is not None else None, cost)


def line_up(comm: Communicator) -> None:
    """Barrier without a sleep in it: the ranks leave it within microseconds of each other.

    Raises
    ------
    CollectiveTimeout
        A rank has not come within the communicator's timeout.
    """
    request = comm.mpi_comm.Ibarrier()
    start = time.perf_counter()
    while not request.Test():
        os.sched_yield()
        if time.perf_counter() - start > comm.timeout:
            raise CollectiveTimeout(
                f"rank {comm.rank} of {comm.size}: not all ranks have come to the next timed call "
                f"after {comm.timeout:g} s; look for a rank that was stopped or killed"
            )


def gather(comm: Communicator, values: Seconds) -> Seconds:
    """All ranks' arrays, float64 of one shape, stacked in rank order on every rank."""
    everything = np.empty((comm.size, *values.shape))
    request = comm.mpi_comm.Iallgather(np.ascontiguousarray(values), everything)
    comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: the ranks' timings do not arrive")
    return everything
