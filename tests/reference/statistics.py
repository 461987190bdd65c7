"""Bounds that a correct generator breaks with a probability that is stated, not guessed."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

ERROR = 1e-9  # of one bound; seeds are fixed, so a bound that holds once holds for ever


@cache
def binomial_bounds(trials: int, probability: float, error: float = ERROR) -> tuple[int, int]:
    """The least and greatest count that a binomial variable leaves with at most `error` / 2 on either side.

    Exact up to rounding: the whole distribution is summed.
    """
    if probability in (0, 1):
        return trials * int(probability), trials * int(probability)
    k = np.arange(1, trials + 1, dtype=np.float64)
    ratios = np.log((trials - k + 1) / k) + math.log(probability / (1 - probability))
    log_mass = np.concatenate([[0.0], np.cumsum(ratios)])
    mass = np.exp(log_mass - log_mass.max())
    mass /= mass.sum()
    below, above = np.cumsum(mass), np.cumsum(mass[::-1])
    low = int(np.searchsorted(below, error / 2, side="right"))
    return low, trials - int(np.searchsorted(above, error / 2, side="right"))


def assert_binomial(count: Any, trials: int, probability: float, what: str = "count") -> None:
    """Fail unless every count is one that `trials` independent events of this probability plausibly give."""
    low, high = binomial_bounds(trials, probability)
    counts = np.atleast_1d(count)
    wrong = np.flatnonzero((counts < low) | (counts > high))
    assert not wrong.size, f"{what} {wrong[:4]}: {counts[wrong][:4]} of {trials}, expected {low} .. {high}"


def assert_chi_square(observed: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    """Fail unless cell counts fit their expectations, neither too badly nor too well.

    The bounds are those of the chi-square distribution: P(X - k >= 2 sqrt(k t) + 2 t) and P(k - X >= 2 sqrt(k t)) are
    at most exp(-t) with k degrees of freedom (Laurent and Massart, Annals of Statistics 28, 2000, lemma 1).
    """
    freedom = observed.size - 1
    statistic = float((((observed - expected) ** 2) / expected).sum())
    t = -math.log(ERROR)
    low, high = freedom - 2 * math.sqrt(freedom * t), freedom + 2 * math.sqrt(freedom * t) + 2 * t
    assert low <= statistic <= high, f"{what}: chi-square {statistic:.1f} with {freedom} degrees of freedom"
