"""Trainings under churn: a killed rank is replaced, and the figures of a way are those of its own turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apps.chaos import churn
from apps.chaos.churn import Clock, Training, Way, campaign, failures, summary, table
from apps.chaos.timeline import Step
from apps.records import Record

pytestmark = pytest.mark.timeout(480)


def test_time_counts_in_turns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(churn.time, "monotonic", lambda: now)
    clock = Clock()
    clock.start()
    now = 110.0
    clock.stop()
    now = 150.0
    clock.start()
    now = 155.0
    assert clock.now == 15.0
    assert clock.at(130.0) == clock.at(150.0) == 10.0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, ""),
        ({"texts": ["replicas differ"]}, "regroup: replicas differ"),
        ({"errors": ["a job ended"]}, "regroup: a job ended"),
        ({"survived": 1}, "regroup: 1 kills were not survived"),
        ({"is_in_band": False, "loss": 2.0}, "the loss 2.0000 is worse"),
    ],
)
def test_failures_are_reported_with_their_way(given: dict[str, Any], text: str) -> None:
    found = failures({"ways": {"regroup": {"texts": [], "errors": [], "tried": 2, "survived": 2} | given}})
    assert len(found) == bool(text)
    assert text in "".join(found)


def test_figures_are_relative_to_the_undisturbed_training(tmp_path: Path) -> None:
    ways = []
    for name, steps, loss in (("undisturbed", 10, 1.0), ("regroup", 8, 1.04), ("raise", 5, 1.06)):
        way = Way(name, Training(), tmp_path / name, tmp_path, {}, 1.0, 1)
        way.timeline.steps += [Step(4, loss, 0, None, 0.0)] * steps
        way.clock._edges, way.clock._seconds = [0.0, 2.0], [0.0, 2.0]
        ways.append(way)
    found = summary(Training(), ways, 1.0, 1, [1.0])["ways"]
    assert [one["samples_per_s"] for one in found.values()] == [20.0, 16.0, 10.0]
    assert [one["goodput"] for one in found.values()] == [1.0, 0.8, 0.5]
    assert [one["is_in_band"] for one in found.values()] == [True, True, False]


def test_ways_with_less_time_have_as_many_turns_which_are_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, float]] = []
    monkeypatch.setattr(churn, "write_data", lambda name, folder: None)
    monkeypatch.setattr(Way, "prepare", lambda way: way.timeline.steps.append(Step(4, 1.0, 0, None, 0.0)))
    monkeypatch.setattr(Way, "take_turn", lambda way, seconds: turns.append((way.name, seconds)))
    campaign(Training(), {"raise": 10.0, "regroup": 100.0}, 60.0, 1.0, 1, tmp_path, lambda record: None)
    assert turns == [("raise", 5.0), ("regroup", 50.0)] * 2


def test_a_rank_that_waits_takes_the_place_of_a_killed_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    training = Training(2, 1, 8, 1000, "digits", "mlp", None)
    reports: list[Record] = []
    record = campaign(training, {"regroup": 1.0}, 1.0, 0.3, 1, tmp_path, reports.append)
    way = record["ways"]["regroup"]
    assert failures(record) == [], failures(record)
    assert way["tried"] == way["survived"] >= 1
    assert way["samples"] > 0
    assert way["residuals_compared"] > 0
    assert way["p50_s"] > 0
    assert "regroup" in table(reports[-1])
