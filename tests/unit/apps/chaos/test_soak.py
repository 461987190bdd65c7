"""Soaks: a job with a death ends with equal results, and leaks are reported."""

from __future__ import annotations

from typing import Any

import pytest

from apps.chaos.soak import Soak, leaks, run, table


def look(call: int, **given: Any) -> dict[str, Any]:
    counted = dict.fromkeys(("objects", "in_flight", "requests", "users", "programs", "plans", "files", "threads"), 7)
    return {"call": call, "members": [0, 1], "resident_mb": 80.0, **counted, "in_flight": 0, **given}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, ""),
        ({"resident_mb": 99.0}, "19.0 MiB"),
        ({"resident_mb": 91.0, "members": [0, 2]}, ""),  # buffers that were in use at a death
        ({"in_flight": 1}, "1 calls in flight"),
        ({"requests": 9}, "2 requests more"),
        ({"requests": 8, "members": [0, 2]}, ""),  # of another place in the plan
        ({"requests": 9, "members": [0, 2]}, "2 requests more"),
        ({"plans": 8}, "1 plans more"),
    ],
)
def test_growth_is_reported(given: dict[str, Any], text: str) -> None:
    found = leaks(0, [look(call) for call in range(9)] + [look(9, **given)])
    assert len(found) == bool(text)
    assert text in "".join(found)


def test_ranks_that_joined_and_died_between_two_looks_count_as_deaths() -> None:
    looks = [look(call, members=[0, 1 + call // 2]) for call in range(9)]
    assert leaks(0, [*looks, look(9, members=[0, 5], resident_mb=95.0)]) == []
    assert leaks(0, [*looks, look(9, members=[0, 5], resident_mb=120.0)]) != []


@pytest.mark.timeout(480)
def test_calls_go_on_after_a_death() -> None:
    record = run(Soak(calls=100, ranks=2, deaths=1, seed=1, methods=("dense",)))
    problems = [text for text in record["failures"] if "grown" not in text and "more" not in text]
    assert problems == []  # memory and objects settle after more calls than these
    assert (record["died"], record["ended"]) == (1, 2)
    assert "| 100 | 1 |" in table([record])
