"""Few elements of a vector: picked, remembered, drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu.sparse import draw_strata, expand, finite_sum, pick, put, remember
from mpicomp.kernels.streams import Stream, source
from tests.reference.sparse import strata, top, within_chunks
from tests.reference.statistics import assert_chi_square

STREAM = Stream(4, 0, "indices")


def drawn(n: int, chunk: int, step: int = 3, cuts: tuple[int, ...] = ()) -> Any:
    """Places of all strata, drawn part by part."""
    places = np.full(-(-n // chunk), -1, np.int64)
    for start, stop in zip((0, *cuts), (*cuts, n), strict=True):
        first, last = start // chunk, -(-stop // chunk)
        at = np.uint64(step), source(0)
        draw_strata(STREAM.schedule(), first, *at, chunk, start, stop, places[first:last])
    return places


@pytest.mark.parametrize("chunk", [1, 3, 100, 5000])
@pytest.mark.parametrize("n", [0, 1, 99, 4097, 100_003])
def test_strata_are_the_references(n: int, chunk: int) -> None:
    np.testing.assert_array_equal(drawn(n, chunk), strata(STREAM.key(), n, chunk, 3))


def test_strata_do_not_depend_on_how_the_vector_is_cut() -> None:
    whole = drawn(10_007, 9)
    for cuts in ((9,), (900, 909), (9 * 511, 9 * 513), (9 * 16, 9 * 17, 9 * 600)):
        np.testing.assert_array_equal(drawn(10_007, 9, cuts=cuts), whole)


def test_every_place_of_a_stratum_is_as_likely() -> None:
    for chunk in (3, 10):
        found = np.concatenate([drawn(chunk * 5000, chunk, step) % chunk for step in range(4)])
        counts = np.bincount(found, minlength=chunk)
        assert_chi_square(counts, np.full(chunk, found.size / chunk), f"places of {chunk}")
    assert (drawn(5000, 10, 1) != drawn(5000, 10, 2)).any()


@pytest.mark.parametrize(("chunk", "keep"), [(1, 1), (10, 1), (10, 3), (1000, 7)])
def test_places_within_chunks_expand_to_those_in_the_vector(chunk: int, keep: int) -> None:
    x = np.random.default_rng(1).standard_normal(2345)
    expected = top(x, chunk, keep)
    places = np.empty_like(expected)
    expand(within_chunks(expected, x.size, chunk, keep), chunk, keep, 0, x.size, places)
    np.testing.assert_array_equal(places, expected)
    expand(within_chunks(expected, x.size, chunk, keep), chunk, keep, 500, 500 + x.size, places)
    np.testing.assert_array_equal(places, expected + 500)


def test_damaged_places_stay_inside() -> None:
    places = np.empty(8, np.int64)
    expand(np.full(8, 2**32 - 1, np.uint32), 10, 2, 20, 20 + 35, places)
    np.testing.assert_array_equal(places, [29, 29, 39, 39, 49, 49, 54, 54])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_in_a_sum_is_noticed(dtype: Any) -> None:
    for n in (0, 1, 15, 16, 17, 4099):
        ones = np.ones(n, dtype)
        assert finite_sum(ones, ones, None)
        for position in {0, n // 2, n - 1} if n else ():
            for bad in (np.nan, np.inf, -np.inf):
                spoiled = ones.copy()
                spoiled[position] = bad
                assert not finite_sum(spoiled, ones, None)
                assert not finite_sum(ones, spoiled, None)
        if n:
            full = np.full(n, np.finfo(dtype).max)
            assert not finite_sum(full, full, None)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_that_is_looked_at_may_be_kept_and_then_lacks_places_alone(dtype: Any) -> None:
    for n in (0, 1, 15, 16, 17, 4099):
        x, residual = np.random.default_rng(n).standard_normal((2, n)).astype(dtype)
        places, found, expected = np.arange(n // 2, n, 3), np.full(n, 7, dtype), np.full(n, 7, dtype)
        assert finite_sum(x, residual, found)
        np.testing.assert_array_equal(found, x + residual)
        remember(None, residual, None, None, 300, places + 300, None, found)
        remember(x, residual, None, None, 300, places + 300, None, expected)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_picked_values_and_the_residual_are_what_numpy_makes_of_them(dtype: Any) -> None:
    rng = np.random.default_rng(2)
    x, residual = rng.standard_normal((2, 1000)).astype(dtype)
    places = np.sort(rng.choice(np.arange(300, 900), 70, replace=False))
    for beta in (1.0, 0.3):
        past, part = (None, None) if beta == 1 else (dtype(1 - beta), dtype(beta))
        values, kept = np.empty(70, dtype), None if beta == 1 else np.empty(70, dtype)
        pick(x, residual, places, past, values, kept)
        np.testing.assert_array_equal(values, (x + residual)[places])
        found, expected, before = residual.copy(), residual.copy(), residual.copy()
        remember(x[300:900], residual[300:900], past, part, 300, places, kept, found[300:900])
        np.testing.assert_array_equal(residual, before)
        total = x + residual
        expected[300:900] = (total if beta == 1 else dtype(1 - beta) * residual + dtype(beta) * total)[300:900]
        expected[places] = 0 if beta == 1 else dtype(1 - beta) * residual[places]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("words", [np.uint16, np.uint32, np.uint64])
def test_values_are_put_where_they_belong(words: Any) -> None:
    out = np.zeros(10, words)
    put(np.array([7, 9], words), np.array([2, 5]), out)
    np.testing.assert_array_equal(out, [0, 0, 7, 0, 0, 9, 0, 0, 0, 0])
