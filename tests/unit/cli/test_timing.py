"""Calls that are timed in turn."""

from __future__ import annotations

import pytest

from mpicomp.cli import timing
from mpicomp.cli.timing import alternate, summary, turns


def test_every_round_begins_with_another_call() -> None:
    calls: list[str] = []
    alternate({name: lambda name=name: calls.append(name) for name in "abc"}, repeats=3, warmup=0)
    assert "".join(calls) == "abcbcacab"


def test_warm_up_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    waits = iter([50.0, 1.0, 4.0, 2.0])

    def wait() -> None:
        now[0] += next(waits)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert summary(alternate({"only": wait}, repeats=3, warmup=1)["only"]) == {"median_s": 2.0, "min_s": 1.0}


@pytest.mark.parametrize(
    ("repeats", "order"),
    [({"a": 4, "b": 2}, "abaaba"), ({"a": 0, "b": 2}, "bb"), ({}, ""), ({"a": 5, "b": 5}, "abbaabbaab")],
)
def test_who_has_fewer_turns_has_them_evenly_spread(repeats: dict[str, int], order: str) -> None:
    assert "".join(turns(repeats)) == order


@pytest.mark.parametrize("fewer", range(8))
def test_everybody_has_as_many_turns_as_asked_for(fewer: int) -> None:
    order = "".join(turns({"a": 7, "b": fewer}))
    assert (order.count("a"), order.count("b")) == (7, fewer)
