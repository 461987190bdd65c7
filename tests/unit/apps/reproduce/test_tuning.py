"""Learning rates are found by climbing a ladder."""

from __future__ import annotations

import math

import pytest

from apps.reproduce.tuning import climb

LADDER = (0.01, 0.03, 0.1, 0.3, 1.0)


@pytest.mark.parametrize("best", LADDER)
@pytest.mark.parametrize("first", LADDER)
def test_the_best_rate_is_found_once_its_neighbours_have_been_tried(first: float, best: float) -> None:
    tried: list[tuple[str, float]] = []

    def scores(plan: list[tuple[str, float]]) -> list[float]:
        tried.extend(plan)
        return [-abs(math.log(rate / best)) if name == "a" else -rate for name, rate in plan]

    assert climb(LADDER, {"a": first, "b": first}, scores) == {"a": best, "b": LADDER[0]}
    at = LADDER.index(best)
    assert {("a", rate) for rate in LADDER[max(0, at - 1) : at + 2]} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_runs_that_failed_are_avoided_and_the_larger_of_equal_rates_is_taken() -> None:
    def scores(plan: list[tuple[str, float]]) -> list[float]:
        return [-math.inf if rate > 0.1 else 0.0 for _, rate in plan]

    assert climb(LADDER, {"a": 1.0}, scores) == {"a": 0.1}  # nothing but failures around the first
    assert climb(LADDER, {"a": 0.03}, scores) == {"a": 0.1}
