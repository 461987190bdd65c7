"""The learning rate over a run."""

from __future__ import annotations

import pytest

from apps.train.learning_rate import LearningRate


def test_warms_up_linearly_to_the_peak() -> None:
    schedule = LearningRate(peak=1.0, n_steps=10, warmup_steps=3)
    assert [schedule(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_starts_at_the_peak_after_the_warm_up_and_ends_at_zero() -> None:
    schedule = LearningRate(peak=2.0, n_steps=12, warmup_steps=2, decay="cosine")
    assert schedule(2) == 2.0
    assert schedule(7) == pytest.approx(1.0)
    assert schedule(12) == pytest.approx(0.0)
    rates = [schedule(step) for step in range(2, 13)]
    assert rates == sorted(rates, reverse=True)


def test_step_decay_acts_at_its_milestones() -> None:
    schedule = LearningRate(peak=1.0, n_steps=10, decay="step", milestones=(4, 6), factor=0.5)
    assert [schedule(step) for step in (0, 3, 4, 5, 6, 9)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
