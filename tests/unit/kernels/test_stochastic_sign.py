"""Stochastic signs and sums of squares: the reference's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.kernels.cpu.stochastic_sign import stochastic_pack, sum_of_squares
from mpicomp.kernels.streams import Stream
from tests.reference.stochastic_signs import stochastic_bits, sums_of_squares

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 4095, 4096, 4097, 3 * 4096 + 65, 100_003)
STREAM = Stream(2, 0, "stochastic sign")


def values(n: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Normal values that start off any alignment; some zeros of both signs."""
    x = np.empty(n + 3, dtype)[3:]
    x[:] = np.random.default_rng(n).standard_normal(n)
    x[::7], x[3::7] = 0.0, -0.0
    return x


def packed(x: NDArray[Any], norm: float, first_group: int = 0, step: int = 4, source: int = 5) -> NDArray[np.uint64]:
    bits = np.full(-(-x.size // 64), 99, np.uint64)
    stochastic_pack(STREAM.schedule(), *map(np.uint64, (first_group, step, source)), x, np.float32(norm), bits)
    return bits


@pytest.mark.parametrize("norm", [0.0, 2.5, 300.0])
def test_signs_equal_the_reference(norm: float) -> None:
    for n in LENGTHS:
        x = values(n)
        np.testing.assert_array_equal(packed(x, norm), stochastic_bits(x, norm, STREAM.key(), 0, 4, 5))


def test_signs_of_a_chunk_are_drawn_by_its_place() -> None:
    x = values(5000)
    whole = packed(x, 80.0)
    np.testing.assert_array_equal(packed(x[1024:], 80.0, first_group=2), whole[16:])
    far = 2**30 - 3
    expected = stochastic_bits(x, 80.0, STREAM.key(), far, 4, 5)
    np.testing.assert_array_equal(packed(x, 80.0, first_group=far), expected)


def test_a_value_as_long_as_the_norm_is_certain() -> None:
    for n in (64, 1000):
        assert np.bitwise_count(packed(np.full(n, 3, np.float32), 3.0)).sum() == n
        assert not packed(np.full(n, -3, np.float32), 3.0).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_squares_equal_the_reference(dtype: Any) -> None:
    for n in LENGTHS:
        x = values(n, dtype)
        sums = np.full(-(-n // 4096), np.nan)
        sum_of_squares(x, sums)
        np.testing.assert_array_equal(sums, sums_of_squares(x))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sums_of_squares_show_what_is_not_finite(bad: float) -> None:
    for n, position in ((40, 5), (40, 35), (5000, 4998), (5000, 100)):
        x = values(n)
        x[position] = bad
        sums = np.empty(-(-n // 4096))
        sum_of_squares(x, sums)
        assert np.flatnonzero(~np.isfinite(sums)).tolist() == [position // 4096]
