"""Soaks: a job with a death ends with equal results, and leaks are reported."""

from __future__ import annotations

from typing import Any

import pytest

from apps.chaos.soak import Soak, leaks, run, summary, table


def look(call: int, **given: Any) -> dict[str, Any]:
    counted = dict.fromkeys(
        ("objects", "in_flight", "requests", "users", "tag", "programs", "plans", "files", "threads"), 7
    )
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
        ({"users": 8}, "1 users more"),
        ({"programs": 8}, "1 programs more"),
        ({"files": 8}, "1 files more"),
        ({"threads": 8}, "1 threads more"),
        ({"objects": 9000}, "8993 objects more"),
        ({"objects": 9000, "members": [0, 2]}, ""),
    ],
)
def test_growth_is_reported(given: dict[str, Any], text: str) -> None:
    found = leaks(0, [look(call) for call in range(9)] + [look(9, **given)])
    assert len(found) == bool(text)
    assert text in "".join(found)


def test_growth_before_a_fifth_of_the_calls_is_none() -> None:
    first = [look(call, requests=3, plans=3, resident_mb=20.0) for call in range(2)]
    assert leaks(0, [*first, *(look(call) for call in range(2, 10))]) == []


def test_ranks_that_joined_and_died_between_two_looks_count_as_deaths() -> None:
    looks = [look(call, members=[0, 1 + call // 2]) for call in range(9)]
    assert leaks(0, [*looks, look(9, members=[0, 5], resident_mb=95.0)]) == []
    assert leaks(0, [*looks, look(9, members=[0, 5], resident_mb=120.0)]) != []


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, ""),
        ({"status": 1}, "status 1; 2 of 2 ranks ended"),
        ({"status": None, "hangs": True}, "it hung"),
        ({"hangs": True}, "it hung"),
        ({"ended": (0,)}, "1 of 2 ranks ended"),
        ({"is_equal": False}, "rank 0: results differ before call 9"),
        ({"requests": 9}, "rank 0: 2 requests more"),
    ],
)
def test_failures_of_a_job_are_reported(given: dict[str, Any], text: str) -> None:
    of_job = {"status": 0, "hangs": False, "ended": (0, 1)}
    of_last = {key: value for key, value in given.items() if key not in of_job}
    status, hangs, ended = ({**of_job, **given}[key] for key in of_job)
    looks = [look(call, kind="look", is_equal=True) for call in range(9)]
    rows = [(rank, row) for rank in (0, 1) for row in looks] + [
        (0, look(9, kind="look", **{"is_equal": True} | of_last))
    ]
    rows += [(rank, {"kind": "end"}) for rank in ended]
    failures = summary(Soak(10, 2, 0, 1), rows, status, hangs, 1.0, "")["failures"]
    assert len(failures) == bool(text)
    assert text in "".join(failures)


@pytest.mark.timeout(480)
def test_calls_go_on_after_a_death() -> None:
    record = run(Soak(calls=100, ranks=2, deaths=1, seed=1, methods=("dense",)))
    problems = [text for text in record["failures"] if "grown" not in text and "more" not in text]
    assert problems == []  # memory and objects settle after more calls than these
    assert (record["died"], record["ended"]) == (1, 2)
    assert "| 100 | 1 |" in table([record])
