"""The cost of a kill is measured by the pace before and behind it, not by that of other jobs."""

from __future__ import annotations

import numpy as np
import pytest

from apps.chaos.pace import Commits, part_kept, seconds_lost

WINDOW = 10.0


def steady(gap: tuple[float, float] = (0.0, 0.0), pace: float = 8.0, change: float = 1.0) -> Commits:
    """Return commits from 0 to 100 s, with none in the gap and another pace behind it."""
    times, now = [], 0.0
    while now < 100:
        if not gap[0] <= now < gap[1]:
            times.append(now)
        now += 1 / (pace * (change if now >= gap[1] > 0 else 1.0))
    return Commits(np.array(times), [64] * len(times))


def test_samples_are_counted_from_a_time_up_to_another_one() -> None:
    commits = Commits(np.array([1.0, 2.0, 2.0, 5.0]), [1, 2, 4, 8])
    assert [commits.between(*span) for span in ((0, 9), (1, 2), (2, 5), (5.5, 9))] == [15, 1, 6, 0]


def test_a_time_before_the_last_one_counts_as_the_last_one() -> None:
    commits = Commits(np.array([1.0, 5.0, 4.0]), [1, 2, 4])
    assert [commits.between(*span) for span in ((4, 5), (5, 6))] == [0, 6]


def test_a_gap_costs_its_seconds() -> None:
    lost = seconds_lost(steady((40.0, 43.0)), 40.0, 43.0, WINDOW)
    assert lost == pytest.approx(3.0, abs=0.2)


def test_nothing_is_lost_without_a_gap() -> None:
    assert seconds_lost(steady(), 40.0, 40.0, WINDOW) == pytest.approx(0.0, abs=0.2)


def test_a_change_of_pace_counts_by_half() -> None:
    """Newcomers are as often faster as slower, so that the halves of many kills cancel."""
    lost = seconds_lost(steady((40.0, 43.0), change=1.2), 40.0, 43.0, WINDOW)
    assert lost == pytest.approx(13 - 10 * 1.2 / 1.1, abs=0.2)


def test_steps_given_up_are_lost() -> None:
    steps = np.arange(0.0, 100.0, 0.125)
    times = np.insert(steps, 320, 40.0)
    counts = np.insert(np.full(len(steps), 64), 320, -16 * 64)
    lost = seconds_lost(Commits(times, counts.tolist()), 40.0, 40.0, WINDOW)
    assert lost == pytest.approx(2.0, abs=0.2)


@pytest.mark.parametrize("kill", [5.0, 95.0], ids=["at the start", "at the end"])
def test_a_window_without_samples_has_no_pace(kill: float) -> None:
    commits = Commits(np.arange(10.0, 95.0), [64] * 85)
    assert seconds_lost(commits, kill, kill, WINDOW) is None


@pytest.mark.parametrize(
    ("lost", "kept"), [([], 1.0), ([None], None), ([2.0, 4.0], 0.94), ([3.0, None], 0.94)]
)  # fmt: skip
def test_a_kill_whose_cost_is_not_known_counts_as_the_mean(lost: list[float | None], kept: float | None) -> None:
    assert part_kept(lost, 100.0) == kept
