"""Run independent studies in as many processes as there are processors."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from apps.records import Record

Key = TypeVar("Key", bound=Hashable)
Run = Callable[[], Record]
"""It must be picklable, such as `functools.partial` of a function of a module."""


def run_parallel(runs: Mapping[Key, Run]) -> dict[Key, Record]:
    """Call each run; return their results under the same keys."""
    workers = min(os.cpu_count() or 1, len(runs))
    # ranks that are threads share one interpreter, so that a run alone leaves a second processor half idle
    if workers < 2:
        return {key: run() for key, run in runs.items()}
    # The processes are spawned: a fork would copy the threads of MPI and torch by halves.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {key: pool.submit(run) for key, run in runs.items()}
        return {key: future.result() for key, future in futures.items()}


def run_seeds(names: Iterable[Key], seeds: int, make: Callable[[Key, int], Run]) -> dict[Key, list[Record]]:
    """Call ``make(name, seed)()`` for each name and seed; returns a list of results, by seed, under each name."""
    names = list(names)
    found = run_parallel({(name, seed): make(name, seed) for seed in range(seeds) for name in names})
    return {name: [found[name, seed] for seed in range(seeds)] for name in names}
