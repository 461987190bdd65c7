"""Timing several ways in turn, so that whatever else the machine does meets all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from mpicomp.cli.bench.measure import gather, line_up

Seconds = NDArray[np.float64]
Sides = Mapping[str, Callable[[], object]]


def alternate(sides: Sides, repeats: int, warmup: int = 2, comm: Communicator | None = None) -> dict[str, Seconds]:
    """Call each side in turn, every turn beginning with the next one.

    Parameters
    ----------
    sides : dict of callable
        On all ranks the same, in the same order.
    repeats, warmup : int
        Calls of each that are timed, and calls before.
    comm : Communicator, optional
        Its ranks line up before each call, and the slowest one's time counts; collective.

    Returns
    -------
    dict of float64[repeats]
        Seconds of each call.
    """
    names = list(sides)
    mine = np.zeros((len(names), repeats))
    for repeat in range(-warmup, repeats):
        for place in range(len(names)):
            side = (repeat + place) % len(names)
            call = sides[names[side]]
            if comm is not None:
                line_up(comm)
            start = time.perf_counter()
            call()
            elapsed = time.perf_counter() - start
            if repeat >= 0:
                mine[side, repeat] = elapsed
    slowest = mine if comm is None else gather(comm, mine).max(axis=0)
    return dict(zip(names, slowest, strict=True))


def summary(seconds: Seconds) -> dict[str, float]:
    """Median and minimum."""
    return {"median_s": float(np.median(seconds)), "min_s": float(seconds.min())}
