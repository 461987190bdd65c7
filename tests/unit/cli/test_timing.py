"""Calls that are timed in turn."""

from __future__ import annotations

import pytest

from mpicomp.cli import timing
from mpicomp.cli.timing import alternate, turns


def test_rounds_have_different_orders_and_runs_the_same_ones() -> None:
    orders = ["".join(turns(dict.fromkeys("abc", 60))) for _ in range(2)]
    rounds = [orders[0][at : at + 3] for at in range(0, 180, 3)]
    assert orders[0] == orders[1]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) == 6


def test_calls_are_made_in_turns() -> None:
    calls: list[str] = []
    alternate({name: lambda name=name: calls.append(name) for name in "abc"}, repeats=3, warmup=0)
    assert "".join(calls) == "".join(turns(dict.fromkeys("abc", 3)))


def test_warm_up_calls_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    waits = iter([50.0, 1.0, 4.0, 2.0])

    def wait() -> None:
        now[0] += next(waits)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    assert alternate({"only": wait}, repeats=3, warmup=1)["only"].tolist() == [1.0, 4.0, 2.0]


@pytest.mark.parametrize(("repeats", "runs"), [({"a": 4, "b": 2}, [2, 2]), ({"a": 9, "b": 3}, [3, 3, 3])])
def test_who_has_fewer_turns_has_them_evenly_spread(repeats: dict[str, int], runs: list[int]) -> None:
    order = "".join(turns(repeats))
    size = len(order) // len(runs)
    assert [order[at : at + size].count("a") for at in range(0, len(order), size)] == runs


def test_who_has_no_turns_has_none() -> None:
    assert "".join(turns({"a": 0, "b": 2})) == "bb"
    assert [*turns({})] == []


@pytest.mark.parametrize("fewer", range(8))
def test_everybody_has_as_many_turns_as_asked_for(fewer: int) -> None:
    order = "".join(turns({"a": 7, "b": fewer}))
    assert (order.count("a"), order.count("b")) == (7, fewer)
