"""Find the best learning rate of each method on a ladder of rates, by climbing from a first guess."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from apps.records import Record
from apps.reproduce.parallel import Run, run_parallel


def climb(
    ladder: Sequence[float],
    first: Mapping[str, float],
    run: Callable[[str, float], Run],
    score: Callable[[Record], float],
) -> dict[str, float]:
    """The best rate of each method, whose neighbours on the ladder have been tried too.

    Parameters
    ----------
    ladder : sequence of float
        All rates, in order.
    first : mapping
        The rate to begin with, by method.
    run : callable
        ``run(method, rate)`` makes a run, which `run_parallel` calls.
    score : callable
        The worth of the result of a run, more being better; -inf for a run that failed.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in first}
    best = dict(first)
    while plan := [(name, rate) for name in first for rate in _around(ladder, best[name]) if rate not in found[name]]:
        for (name, rate), record in run_parallel({key: run(*key) for key in plan}).items():
            found[name][rate] = score(record)
        best = {name: _best(known) for name, known in found.items()}
    return best


def _best(known: Mapping[float, float]) -> float:
    """The rate with the highest score; of equal scores the largest rate, but the smallest if all runs failed."""
    failed = max(known.values()) == -math.inf
    return max(known, key=lambda rate: (known[rate], -rate if failed else rate))


def _around(ladder: Sequence[float], rate: float) -> Sequence[float]:
    at = ladder.index(rate)
    return ladder[max(0, at - 1) : at + 2]
