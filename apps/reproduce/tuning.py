"""Learning rates: each method's is the best of a ladder of rates, found by climbing from where it presumably is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence


def climb(
    ladder: Sequence[float],
    first: Mapping[str, float],
    scores: Callable[[list[tuple[str, float]]], Sequence[float]],
) -> dict[str, float]:
    """Each method's best rate, whose neighbours on the ladder have been tried too.

    Parameters
    ----------
    ladder : sequence of float
        All rates, in order.
    first : mapping
        By method: the rate to begin with.
    scores : callable
        What runs of these methods at these rates are worth, more being better; -inf for a run that failed.
    """
    found: dict[str, dict[float, float]] = {name: {} for name in first}
    best = dict(first)
    while plan := [(name, rate) for name in first for rate in _around(ladder, best[name]) if rate not in found[name]]:
        for (name, rate), score in zip(plan, scores(plan), strict=True):
            found[name][rate] = score
        for name, known in found.items():
            best[name] = _best(known)
    return best


def _best(known: Mapping[float, float]) -> float:
    """The rate with the most; of equal ones the largest, but where all failed the smallest."""
    failed = max(known.values()) == -math.inf
    return max(known, key=lambda rate: (known[rate], -rate if failed else rate))


def _around(ladder: Sequence[float], rate: float) -> Sequence[float]:
    at = ladder.index(rate)
    return ladder[max(0, at - 1) : at + 2]
