"""Runs that know nothing of each other, in as many processes as there are processors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from apps.records import Record


def side_by_side(runs: Sequence[Callable[[], Record]]) -> list[Record]:
    """What each run returns, in order.

    Parameters
    ----------
    runs : sequence of callable
        Picklable, such as `functools.partial` of a function of a module. Ranks that are threads take Python in
        turns, so a run by itself leaves a second processor half idle.
    """
    workers = min(os.cpu_count() or 1, len(runs))
    if workers < 2:
        return [run() for run in runs]
    # spawned, as a fork would copy MPI's and torch's threads half
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(run) for run in runs]]
