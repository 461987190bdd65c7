"""Find the best learning rate of each method on a ladder of rates, by climbing from a first guess."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from apps.records import Record
from apps.studies.parallel import Run, run_parallel


def climb(
    ladder: Sequence[float],
    first: Mapping[str, float],
    run: Callable[[str, float], Run],
    score: Callable[[Record], float],
) -> dict[str, float]:
    """Return the best rate of each method, whose neighbours on the ladder have been tried too."""
    found: dict[str, dict[float, float]] = {name: {} for name in first}
    # a higher score of a run's result is better; a run that failed has -inf
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
