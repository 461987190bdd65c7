"""Trainings under churn: a killed rank is replaced, and the figures of a way are those of its own turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.chaos import churn
from apps.chaos.churn import Clock, Training, campaign, failures, table
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


def test_a_rank_that_waits_takes_the_place_of_a_killed_one(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    training = Training(2, 1, 8, 1000, "digits", "mlp", None)
    reports: list[Record] = []
    record = campaign(training, 1.0, 1.0, 0.3, 1, tmp_path, reports.append, ("regroup",))
    way = record["ways"]["regroup"]
    assert failures(record) == [], failures(record)
    assert way["tried"] == way["survived"] >= 1
    assert way["samples"] > 0
    assert way["residuals_compared"] > 0
    assert way["p50_s"] > 0
    assert "regroup" in table(reports[-1])
