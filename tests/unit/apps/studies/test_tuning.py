"""Learning rates are found by climbing a ladder."""

from __future__ import annotations

import math
from functools import partial

import pytest

from apps.records import Record
from apps.studies.tuning import climb

LADDER = (0.01, 0.03, 0.1, 0.3, 1.0)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apps.studies.parallel.os.cpu_count", lambda: 1)


@pytest.mark.parametrize("best", LADDER)
@pytest.mark.parametrize("first", LADDER)
def test_the_best_rate_is_found_once_its_neighbours_have_been_tried(first: float, best: float) -> None:
    tried: list[tuple[str, float]] = []

    def run(name: str, rate: float) -> partial[Record]:
        tried.append((name, rate))
        return partial(dict, name=name, rate=rate)

    def score(record: Record) -> float:
        return -abs(math.log(record["rate"] / best)) if record["name"] == "a" else -record["rate"]

    assert climb(LADDER, {"a": first, "b": first}, run, score) == {"a": best, "b": LADDER[0]}
    at = LADDER.index(best)
    assert {("a", rate) for rate in LADDER[max(0, at - 1) : at + 2]} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_runs_that_failed_are_avoided_and_the_larger_of_equal_rates_is_taken() -> None:
    def run(name: str, rate: float) -> partial[Record]:
        return partial(dict, rate=rate)

    def score(record: Record) -> float:
        return -math.inf if record["rate"] > 0.1 else 0.0

    assert climb(LADDER, {"a": 1.0}, run, score) == {"a": 0.1}  # nothing but failures around the first
    assert climb(LADDER, {"a": 0.03}, run, score) == {"a": 0.1}
