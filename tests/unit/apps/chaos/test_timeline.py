"""Timelines of trainings under churn: committed and repeated steps, times of kills, and results that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest

from apps.chaos.timeline import LAG, LOSS_STEPS, PAUSED_LAG, Timeline


def row(step: int, members: tuple[int, ...] = (0, 1), **given: Any) -> dict[str, Any]:
    found = {"kind": "step", "step": step, "time": float(step), "members": list(members), "digest": step, "loss": 1.0}
    return found | {"vector": 2.0, "result": 1.5, "residual": 0.5 * (step + 1), "size": 1.0} | given


def started(steps: int, members: tuple[int, ...] = (0, 1)) -> Timeline:
    timeline = Timeline(8, is_balanced=True)
    timeline.begin_job(0)
    for step in range(steps):
        for rank in members:
            timeline.add(rank, row(step, members))
    return timeline


def test_steps_and_their_residuals_are_counted() -> None:
    timeline = started(5)
    timeline.end_job()
    assert (timeline.wrong, timeline.samples, timeline.balanced) == ([], 5 * 2 * 8, 4)


@pytest.mark.parametrize(
    ("given", "text"),
    [({"digest": 7}, "replicas differ"), ({"result": 1.4}, "residuals"), ({"step": 6}, "step 6 follows 4")],
)
def test_results_that_cannot_be_are_reported(given: dict[str, Any], text: str) -> None:
    timeline = started(5)
    timeline.add(0, row(5))
    timeline.add(1, row(5) | given)
    timeline.end_job()
    assert text in timeline.wrong[0]
    assert timeline.n_wrong == len(timeline.wrong)


def test_steps_that_no_rank_has_reported_are_missed() -> None:
    timeline = started(5)
    timeline.add(2, {"kind": "joined", "step": 7, "digest": 2, "residual": 0.0, "size": 0.0})
    timeline.add(2, row(7, residual=0.5))
    timeline.end_job()
    assert timeline.wrong == ["job 0: step 7 follows 4"]


def test_a_step_whose_line_died_with_its_rank_is_not_balanced() -> None:
    timeline = started(5)
    timeline.add(0, row(5, result=1.4))  # of a mean with the residual of rank 1
    timeline.end_job()
    assert (timeline.wrong, timeline.unbalanced) == ([], 1)
    timeline.begin_job(6, (0, 1))
    timeline.add(0, {"kind": "restored", "step": 6, "digest": 5, "residual": 9.0, "size": 1.0})
    timeline.add(0, row(6, residual=9.5))
    timeline.end_job()
    assert timeline.wrong == []  # the mean residual of before is unknown


@pytest.mark.parametrize(("restored", "n_wrong"), [(2.0, 0), (3.0, 1)])
def test_a_rank_that_died_before_a_checkpoint_has_no_residual_in_it(restored: float, n_wrong: int) -> None:
    timeline = started(5)
    timeline.add(0, row(5, residual=2.0))
    timeline.add(1, row(5, residual=4.0))
    timeline.end_job()
    timeline.wrong.clear()
    timeline.begin_job(6, (0,))
    for rank in (0, 1):
        timeline.add(rank, {"kind": "restored", "step": 6, "digest": 5, "residual": restored, "size": 1.0})
        timeline.add(rank, row(6, residual=restored + 0.5))
    timeline.end_job()
    assert len([one for one in timeline.wrong if "mean residual" in one]) == n_wrong


def test_the_lost_part_of_the_residuals_is_that_of_the_last_step_with_all_lines() -> None:
    timeline = started(5, (0, 1, 2))
    timeline.add(0, row(5, (0, 1, 2), size=100.0))
    timeline.add_kill(1, 5.5)
    assert timeline.kills[0].lost == pytest.approx(1 / 3)


def test_a_paused_job_leaves_the_last_steps_open() -> None:
    timeline = started(6)
    timeline.settle()
    assert len(timeline.steps) == 6 - PAUSED_LAG


def test_losses_are_means_of_the_steps_up_to_some_samples() -> None:
    timeline = Timeline(8, is_balanced=False)
    assert math.isnan(timeline.loss_at(1))
    timeline.begin_job(0)
    for step in range(3 * LOSS_STEPS):
        timeline.add(0, row(step, (0,), loss=float(step)))
    timeline.end_job()
    assert timeline.loss_at(8 * 2 * LOSS_STEPS) == 1.5 * LOSS_STEPS - 0.5


def test_reports_of_checkpoints_and_missing_spares_are_kept() -> None:
    timeline = started(1)
    timeline.add(0, {"kind": "saved", "seconds": 0.5})
    timeline.add(0, {"kind": "short"})
    assert (timeline.save_seconds, timeline.is_short) == ([0.5], True)


def test_a_kill_is_survived_once_all_others_have_made_a_step_without_the_dead_rank() -> None:
    timeline = started(5, (0, 1, 2))
    timeline.add_kill(1, 4.5)
    assert timeline.kills[0].lost == pytest.approx(1 / 3)
    timeline.add(0, row(5, (0, 1, 2), time=4.6))  # has not noticed the death yet
    timeline.add(2, row(5, (0, 2), time=4.7))
    timeline.add(0, row(6, (0, 2), time=4.8))
    assert timeline.pending is not None
    timeline.add(2, row(6, (0, 2), time=4.9))
    assert timeline.pending is None
    assert timeline.kills[0].recovered == 4.9
    timeline.end_job()
    assert timeline.wrong == []


def test_steps_behind_a_checkpoint_are_repeated_and_count_once() -> None:
    timeline = started(8)
    timeline.add_kill(1, 7.5)
    timeline.add(0, row(8))
    timeline.end_job()
    timeline.begin_job(6, (0, 1))
    for rank in (0, 1):
        timeline.add(rank, {"kind": "restored", "step": 6, "digest": 5, "residual": 3.0, "size": 1.0})
    for step in range(6, 10):
        for rank in (0, 1):
            timeline.add(rank, row(step, time=step + 10.0))
    assert timeline.kills[0].recovered == 19.0  # the first step that no job had committed
    timeline.end_job()
    assert (timeline.wrong, timeline.repeated, timeline.samples) == ([], 3, 10 * 2 * 8)


@pytest.mark.parametrize(
    ("given", "text"),
    [({"digest": 4}, "another model"), ({"residual": 2.0}, "mean residual"), ({"step": 5}, "restored step 5, not 6")],
)
def test_a_checkpoint_that_differs_is_reported(given: dict[str, Any], text: str) -> None:
    timeline = started(8)
    timeline.end_job()
    timeline.begin_job(6, (0, 1))
    for rank in (0, 1):
        timeline.add(rank, {"kind": "restored", "step": 6, "digest": 5, "residual": 3.0, "size": 1.0} | given)
        timeline.add(rank, row(6, residual=given.get("residual", 3.0) + 0.5))
    timeline.end_job()
    assert any(text in one for one in timeline.wrong)


def test_a_step_in_which_a_newcomer_died_before_it_wrote_its_line_is_not_balanced() -> None:
    timeline = started(5, (0,))
    timeline.add(2, {"kind": "joined", "step": 5, "digest": 4, "residual": 0.0, "size": 0.0})
    timeline.add(0, row(5, (0,), result=1.4))  # of a mean with the vector of rank 2
    timeline.end_job()
    assert (timeline.wrong, timeline.unbalanced) == ([], 1)


def test_newcomers_join_without_pending_errors() -> None:
    timeline = started(3)
    timeline.add(2, {"kind": "joined", "step": 3, "digest": 2, "residual": 0.25, "size": 0.25})
    assert "joined with a residual" in timeline.wrong[0]


def test_long_trainings_close_their_steps() -> None:
    timeline = started(10 * LAG)
    assert len(timeline.steps) >= 7 * LAG


def test_commits_count_samples_by_the_time_of_the_last_line() -> None:
    timeline = started(3)
    timeline.end_job()
    assert timeline.commits == [(0.0, 16), (1.0, 16), (2.0, 16)]


def test_steps_that_a_restart_gives_up_are_taken_back_at_the_time_of_the_kill() -> None:
    timeline = started(5)
    timeline.add_kill(1, 4.5)
    timeline.end_job()
    timeline.begin_job(3, (0, 1))
    assert timeline.commits[-1] == (4.5, -32)
    assert sum(count for _, count in timeline.commits) == timeline.samples


def test_a_kill_that_a_restart_follows_is_settled_by_the_first_step_of_the_next_job() -> None:
    timeline = started(5)
    timeline.add_kill(1, 4.5)
    timeline.add(0, row(5, (0,)))
    kill = timeline.kills[0]
    assert kill.recovered == kill.settled == 5.0
    timeline.end_job()
    timeline.begin_job(6, (0,))
    assert kill.settled is None
    for rank in (0, 1):
        timeline.add(rank, row(6, time=90.0 + rank))
    timeline.settle()
    timeline.end_job()
    assert (kill.recovered, kill.settled) == (5.0, 91.0)
