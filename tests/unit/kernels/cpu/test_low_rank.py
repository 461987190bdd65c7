"""Products with low-rank factors and orthonormal rows, against plain NumPy in the same order of operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu.low_rank import expand, orthonormalize, project, project_back
from tests.reference.one_process import low_rank

both_types = pytest.mark.parametrize("dtype", [np.float32, np.float64])
SHAPES = ((1, 1, 1), (3, 5, 1), (5, 16, 2), (8, 515, 4), (33, 47, 5), (130, 1030, 3))


def drawn(dtype: Any, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@both_types
@pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)
def test_products_are_the_references_however_the_matrix_is_cut(dtype: Any, rows: int, cols: int, rank: int) -> None:
    values, residual, q, p = drawn(dtype, (rows, cols), (rows, cols), (rank, cols), (rank, rows))
    added, expected_q = values + residual, np.zeros_like(q)
    for i in range(rows):
        expected_q += p[:, i : i + 1] * added[i]
    product = p[0][:, None] * expected_q[0]
    for k in range(1, rank):
        product = product + p[k][:, None] * expected_q[k]
    for step in (rows, 4, 3):
        found_p, sums, out = np.empty_like(p), np.empty_like(values), np.empty_like(values)
        cuts = [(k, min(k + step, rows)) for k in range(0, rows, step)]
        for first, stop in cuts:
            flat = (one[first:stop].reshape(-1) for one in (values, residual, sums))
            given, kept, target = flat
            assert project(given, kept, q, first, target, found_p) == np.abs(added[first:stop]).max()
        np.testing.assert_array_equal(sums, added)
        np.testing.assert_array_equal(found_p, low_rank.products(q, added))
        found_q = np.empty_like(q)
        for start in range(0, cols, 31 * step):
            project_back(sums.reshape(-1), p, start, min(start + 31 * step, cols), found_q)
        np.testing.assert_array_equal(found_q, expected_q)
        for first, stop in cuts:
            largest = expand(p, first, found_q, sums[first:stop].reshape(-1), out[first:stop].reshape(-1))
            assert largest == np.abs(product[first:stop]).max()
        np.testing.assert_array_equal(out, product)
        np.testing.assert_array_equal(sums, added - product)
        expand(p, 0, found_q, None, sums.reshape(-1))
        np.testing.assert_array_equal(sums, product)


@pytest.mark.parametrize("place", [0, 17, 39, 40])
def test_nan_is_the_largest_magnitude_and_infinity_the_next(place: int) -> None:
    values, zeros, q, p = (
        np.ones(41, np.float32),
        np.zeros(41, np.float32),
        np.ones((1, 41), np.float32),
        np.ones((1, 1), np.float32),
    )
    for bad in (np.inf, -np.inf, np.nan):
        values[place] = bad
        largest = project(values, zeros, q, 0, np.empty_like(values), np.empty_like(p))
        np.testing.assert_equal(largest, abs(np.float32(bad)))
        np.testing.assert_equal(expand(p, 0, values.reshape(1, -1), None, zeros.copy()), abs(np.float32(bad)))


@both_types
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize(("rank", "n"), [(1, 1), (2, 3), (4, 100), (8, 4099)])
def test_rows_become_orthonormal_whatever_their_magnitudes(dtype: Any, scale: float, rank: int, n: int) -> None:
    (rows,) = drawn(dtype, (rank, n))
    rows[-1] = rows[0] * (1 if rank > 1 else 0) + dtype(1e-3) * rows[-1]  # nearly the first one
    before = rows.astype(np.float64)
    rows *= dtype(scale)
    rows[0] *= dtype(1e-5)
    expected = rows.copy()
    assert orthonormalize(rows, float(np.finfo(dtype).eps)) == 0
    assert low_rank.orthonormalize(expected) == []
    np.testing.assert_array_equal(rows, expected)
    precision = 8 * np.finfo(dtype).eps
    np.testing.assert_allclose(rows.astype(np.float64) @ rows.T.astype(np.float64), np.eye(rank), atol=precision)
    inside = before @ rows.T.astype(np.float64) @ rows.astype(np.float64)
    np.testing.assert_allclose(inside, before, atol=1e-4 * np.abs(before).max())


@both_types
def test_rows_that_depend_on_earlier_ones_become_zeros_and_are_counted(dtype: Any) -> None:
    (rows,) = drawn(dtype, (5, 70))
    rows[1], rows[2], rows[4] = 0, 2 * rows[0], -8 * rows[0]
    expected = rows.copy()
    assert orthonormalize(rows, float(np.finfo(dtype).eps)) == 3
    assert low_rank.orthonormalize(expected) == [1, 2, 4]
    np.testing.assert_array_equal(rows, expected)
    assert (rows.any(axis=1) == [True, False, False, True, False]).all()


@both_types
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_end_as_nan(dtype: Any, bad: float) -> None:
    (rows,) = drawn(dtype, (2, 30))
    rows[0, 29] = bad
    orthonormalize(rows, float(np.finfo(dtype).eps))
    assert np.isnan(rows).any()
