"""The largest of each chunk: the reference's places, whatever the values, lengths and ties."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.codecs.top_k import Selector, count_kept
from tests.reference.sparse import top, within_chunks

LENGTHS = (0, 1, 7, 15, 16, 17, 63, 64, 65, 99, 100, 101, 1000, 4096, 5003)
# chunk and how many are kept: one or several, vectors of 16 filled or not
SHAPES = (
    (1, 1), (2, 1), (7, 1), (16, 1), (17, 1), (100, 1), (128, 1), (5003, 1),
    (2, 2), (7, 3), (10, 9), (16, 16), (17, 2), (64, 2), (100, 10), (1000, 10), (1000, 333), (1024, 2), (6000, 60),
    (5003, 2), (5003, 31), (5003, 500), (5003, 5003),
)  # fmt: skip
FLOATS = (np.float32, np.float64)


def kinds(n: int, dtype: Any) -> dict[str, NDArray[Any]]:
    """Vectors that start off any alignment."""
    rng = np.random.default_rng(n)
    normal = rng.standard_normal(n)
    tiny = float(np.finfo(dtype).smallest_subnormal)
    made = {
        "normal": normal,
        "ties": rng.integers(-3, 4, n) * 0.5,
        "zeros of both signs": np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "few": np.where(rng.random(n) < 0.01, normal, 0.0),
        "one value": np.full(n, -2.5),
        "growing": np.arange(n) + 1.0,
        "falling": -np.arange(n, 0, -1.0),
        "subnormal": rng.integers(-5, 6, n) * tiny,
        "all magnitudes": normal * 10.0 ** rng.integers(-30, 31, n),
    }
    moved = {}
    for name, values in made.items():
        moved[name] = np.empty(n + 3, dtype)[3:]
        moved[name][:] = values
    return moved


def select(
    x: NDArray[Any], residual: NDArray[Any] | None, chunk: int, keep: int
) -> tuple[NDArray[np.uint32], NDArray[Any], bool]:
    count = count_kept(x.size, chunk, keep)
    indices, values = np.full(count, 77, np.uint32), np.full(count, np.nan, x.dtype)
    return indices, values, Selector(chunk, keep, x.dtype)(x, residual, indices, values)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_and_values_are_the_references(shape: tuple[int, int], dtype: Any) -> None:
    chunk, keep = shape
    for n in LENGTHS:
        for name, x in kinds(n, dtype).items():
            indices, values, finite = select(x, None, chunk, keep)
            places = top(x, chunk, keep)
            np.testing.assert_array_equal(indices, within_chunks(places, n, chunk, keep), f"{name}, {n}")
            np.testing.assert_array_equal(values, x[places], f"{name}, {n}")
            assert finite


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 1), (100, 1), (100, 3), (1000, 40)], ids=str)
def test_a_residual_is_added_on_the_fly(shape: tuple[int, int], dtype: Any) -> None:
    chunk, keep = shape
    for n in LENGTHS:
        x, residual = kinds(n, dtype)["ties"], kinds(n + 1, dtype)["ties"][:n]
        before = x.copy(), residual.copy()
        indices, values, _ = select(x, residual, chunk, keep)
        places = top(x + residual, chunk, keep)
        np.testing.assert_array_equal(indices, within_chunks(places, n, chunk, keep))
        np.testing.assert_array_equal(values, (x + residual)[places])
        np.testing.assert_array_equal((x, residual), before)


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(7, 1), (100, 1), (100, 3), (1000, 40)], ids=str)
def test_what_is_not_finite_is_noticed_wherever_it_is(shape: tuple[int, int], bad: float) -> None:
    for dtype in FLOATS:
        for n in (1, 20, 101, 1013):
            for position in {0, n // 2, max(0, n - 17), n - 1}:
                x = np.ones(n, dtype)
                assert select(x, x, *shape)[2]
                spoiled = x.copy()
                spoiled[position] = bad
                for one, other in ((spoiled, None), (spoiled, x), (x, spoiled)):
                    indices, _, finite = select(one, other, *shape)
                    assert not finite, (dtype, n, position)
                    assert (indices < shape[0]).all()


def test_a_sum_that_overflows_is_noticed() -> None:
    for shape in ((10, 1), (10, 2)):
        x = np.full(40, 3e38, np.float32)
        assert select(x, None, *shape)[2]
        assert not select(x, x, *shape)[2]


def test_no_more_is_written_than_there_is_room_for() -> None:
    """The working memory is as long as it must be: values that reach the bound in whole groups do not overrun it."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        chunk = int(rng.integers(2, 3000))
        keep = int(rng.integers(2, chunk + 1))
        n = int(rng.integers(1, 2 * chunk))
        x = np.where(rng.random(n) < rng.random(), rng.integers(1, 3, n), rng.integers(0, 2, n)).astype(np.float32)
        x = np.repeat(x, 16)[:n] if rng.random() < 0.5 else x
        indices, _, _ = select(x, None, chunk, keep)
        np.testing.assert_array_equal(indices, within_chunks(top(x, chunk, keep), n, chunk, keep))
