"""Diagnostics: the values that geometry and the paper's lemma give."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from mpicomp import Communicator
from mpicomp.diagnostics import (
    contraction,
    contraction_bound,
    cosine_distances,
    gather_rows,
    matching_rate,
    mean_cosine_distance,
    missed,
    top_k,
)
from tests.reference.sparse import top


def test_cosine_distances_of_known_angles() -> None:
    rows = np.array([[1, 0], [5, 0], [0, 2], [-3, 0], [1, 1]], np.float32)
    distances = cosine_distances(rows)
    np.testing.assert_allclose(distances[0], [0, 0, 1, 2, 1 - np.sqrt(0.5)], atol=1e-12)
    np.testing.assert_allclose(distances, distances.T)
    assert mean_cosine_distance(rows[:3]) == pytest.approx((0 + 1 + 1) / 3)
    assert np.isnan(mean_cosine_distance(rows[:1]))
    assert np.isnan(cosine_distances(np.array([[0, 0], [1, 2]]))[0]).all()


def test_large_and_small_numbers_have_angles_too() -> None:
    rows = np.full((2, 1000), 3e38, np.float32)
    assert cosine_distances(rows)[0, 1] == pytest.approx(0, abs=1e-12)


def test_top_k_is_the_largest_of_one_chunk() -> None:
    x = np.random.default_rng(0).integers(-3, 4, 500).astype(np.float32)
    for k in (0, 1, 77, 500):
        np.testing.assert_array_equal(top_k(x, k), top(x, 500, k) if k else [])
    for k in (-1, 501):
        with pytest.raises(ValueError, match=f"k must lie in 0 .. 500, the elements there are, not {k}"):
            top_k(x, k)


def test_missed_is_half_the_hamming_distance_over_k() -> None:
    chosen, true = np.array([1, 4, 6, 9]), np.array([0, 4, 6, 8])
    assert missed(chosen, true) == 0.5
    assert missed(chosen, chosen) == 0
    assert missed(chosen, np.array([20, 21, 22, 23])) == 1
    hamming = len(set(chosen) ^ set(true))
    assert missed(chosen, true) == hamming / (2 * chosen.size)
    with pytest.raises(ValueError, match="chosen must have one index at least"):
        missed(chosen[:0], true)


def test_a_choice_loses_no_more_than_its_bound() -> None:
    """Lemma 1, over choices from bad to good."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(2000) ** 3
    true = top_k(x, 40)
    gamma_0 = contraction(x, true)
    assert 0 < gamma_0 < 1 - 40 / 2000
    for right in (0, 1, 20, 39, 40):
        others = rng.choice(np.setdiff1d(np.arange(2000), true), 40 - right, replace=False)
        chosen = np.concatenate([rng.choice(true, right, replace=False), others])
        bound = contraction_bound(missed(chosen, true), gamma_0)
        # the lemma speaks of the mean over which of the largest are missed
        mean_kept = (x[true] ** 2).sum() * right / 40
        assert 1 - mean_kept / (x**2).sum() <= bound + 1e-12
        assert missed(chosen, true) == pytest.approx(1 - right / 40)
    assert contraction_bound(0, gamma_0) == gamma_0
    assert contraction_bound(1, gamma_0) == 1


def test_contraction_is_what_is_lost() -> None:
    x = np.array([3.0, 0, 4.0])
    assert contraction(x, np.array([2])) == pytest.approx(9 / 25)
    assert contraction(x, np.array([0, 2])) == 0
    assert contraction(np.zeros(3), np.array([0])) == 0
    with pytest.raises(ValueError, match=r"gamma_0 must lie between 0 and 1, not 1\.5"):
        contraction_bound(0.5, 1.5)


def test_matching_rate_counts_zero_as_positive() -> None:
    assert matching_rate(np.array([1.0, -1, 0, -0.0]), np.array([2.0, 1, 3, 5])) == 0.75
    assert np.isnan(matching_rate(np.zeros(0), np.zeros(0)))


def test_one_rank_has_one_row() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        rows = gather_rows(comm, np.arange(4, dtype=np.float64)[::2])
    np.testing.assert_array_equal(rows, [[0, 2]])
