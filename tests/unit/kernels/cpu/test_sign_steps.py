"""Reports of the ranks about their signs, running magnitudes, and the steps that follow them."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomp.kernels.cpu.sign_steps import add_up, follow, set_steps

COUNTS = np.array([10.0, 4.0])
# clipped elements, then sums of |u| of two segments, of three ranks
GATHERED = np.array([[1.0, 20.0, 2.0], [0.0, 30.0, 4.0], [4.0, 10.0, 6.0]])


def test_a_report_adds_up_each_segment_s_blocks_in_order() -> None:
    """2^53 swallows a 1 that comes after it."""
    sums = np.array([1.0, 2.0, 2.0**53, 1.0, 1.0, 1.0, 1.0, 2.0**53])
    report = np.full(5, np.nan)
    add_up(sums, np.array([0, 2, 5, 7]), 12, report)
    np.testing.assert_array_equal(report, [12, 3, 2.0**53, 2, 2.0**53])


def test_the_first_magnitudes_are_the_means() -> None:
    running = np.full(2, np.nan)
    assert follow(GATHERED, COUNTS, 0.9, running) == 5
    np.testing.assert_array_equal(running, [6, 3])


def test_later_ones_move_a_tenth_of_the_way() -> None:
    running = np.array([1.0, 13.0])
    follow(GATHERED, COUNTS, 0.9, running)
    np.testing.assert_allclose(running, [0.9 * 1 + 0.1 * 6, 0.9 * 13 + 0.1 * 3], rtol=1e-15)


def test_sums_are_taken_in_rank_order() -> None:
    """Another order loses the 1 next to 2^53."""
    ranks = np.array([[0, 1.0], [0, 2.0**53], [0, -(2.0**53)]])
    running = np.full(1, np.nan)
    follow(ranks, np.ones(1), 0.9, running)
    assert running[0] == 0
    follow(ranks[[1, 2, 0]], np.ones(1), 0.0, running)
    assert running[0] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [(0, 1), (2, 2)])
def test_a_sum_that_is_not_finite_is_told_and_leaves_the_magnitudes_alone(bad: float, place: tuple[int, int]) -> None:
    gathered, running = GATHERED.copy(), np.array([1.0, 2.0])
    gathered[place] = bad
    assert np.isnan(follow(gathered, COUNTS, 0.9, running))
    np.testing.assert_array_equal(running, [1, 2])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_are_rounded_once(dtype: type) -> None:
    running = np.array([0.1, 3.0, 0.0])
    positive, negative, limits = np.empty((3, 3), dtype)
    assert set_steps(running, 3.0, 1.5, positive, negative, limits)
    np.testing.assert_array_equal(positive, (3.0 * running).astype(dtype))
    np.testing.assert_array_equal(negative, -positive)
    np.testing.assert_array_equal(limits, positive * dtype(1.5))


@pytest.mark.parametrize(("dtype", "magnitude"), [(np.float32, 1e38), (np.float64, 1e308), (np.float32, np.nan)])
def test_steps_that_are_not_finite_are_told(dtype: type, magnitude: float) -> None:
    for place in range(3):
        running = np.ones(3)
        running[place] = magnitude
        assert not set_steps(running, 4.0, 1.0, *np.empty((3, 3), dtype))
