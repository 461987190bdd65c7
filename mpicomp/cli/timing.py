"""Timing of several calls in turn, so that other load on the machine affects all of them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from collectives import CollectiveTimeout, Communicator
from collectives.annotations import Doubles

Seconds = Doubles
Calls = Mapping[str, Callable[[], object]]


def alternate(
    calls: Calls, repeats: int | Mapping[str, int], warmup: int = 2, comm: Communicator | None = None
) -> dict[str, Seconds]:
    """Time calls in turn; return the float64[repeats] seconds of each. Collective with `comm`."""
    # with `comm`, all ranks pass the same calls in the same order
    counts = dict.fromkeys(calls, repeats) if isinstance(repeats, int) else repeats
    for name in turns(dict.fromkeys(calls, warmup)):
        elapsed(calls[name], comm)
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for name in turns(counts):
        mine[name].append(elapsed(calls[name], comm))
    # each call began behind a barrier, and the slowest rank's time counts
    return {name: slowest(np.array(seconds, np.float64), comm) for name, seconds in mine.items()}


def turns(repeats: Mapping[str, int]) -> Iterator[str]:
    """Yield the names in the order of their calls, round by round, the same on all ranks and in all runs."""
    names, rounds, draw = list(repeats), max(repeats.values(), default=0), random.Random(0)
    for number in range(rounds):
        # in a fixed order, a call that follows a heavy one would look slower than elsewhere
        for name in draw.sample(names, len(names)):
            # names with fewer calls have theirs in evenly spread rounds
            if (number + 1) * repeats[name] // rounds > number * repeats[name] // rounds:
                yield name


def elapsed(call: Callable[[], object], comm: Communicator | None = None) -> float:
    """Return the seconds of a call on this rank, behind a barrier if there is a `comm`; then collective."""
    if comm is not None:
        spin_barrier(comm)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def slowest(mine: Seconds, comm: Communicator | None) -> Seconds:
    """Return the greatest of all ranks' values, element by element; collective."""
    return mine if comm is None else np.asarray(gather(comm, mine).max(axis=0))


def spin_barrier(comm: Communicator) -> None:
    """Wait for all ranks without sleeping, so that they leave within microseconds of each other."""
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
    """Return all ranks' arrays, float64 of one shape, stacked in rank order."""
    everything = np.empty((comm.size, *values.shape))
    request = comm.mpi_comm.Iallgather(np.ascontiguousarray(values), everything)
    comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: the ranks' timings do not arrive")
    return everything
