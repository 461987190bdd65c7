"""EF-signSGD's pass: the reference's vector, signs and sums, and what it is made of is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.arrays import aligned_empty
from mpicomp.kernels.ef_sign import compensate_and_pack, settle
from tests.reference.signs import magnitudes, pack_bits

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 3 * 4096 + 65, 100_003)


def values(n: int, dtype: Any, seed: int) -> NDArray[Any]:
    """Normal values; some zeros of both signs."""
    x = np.random.default_rng((n, seed)).standard_normal(n).astype(dtype)
    x[seed::5], x[seed + 1 :: 5] = 0.0, -0.0
    return x


@pytest.mark.parametrize("scale", [0.0, 0.7])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_pass_is_the_reference_s_steps(dtype: Any, n: int, scale: float) -> None:
    g, before, s = values(n, dtype, 0), values(n, dtype, 1), dtype(scale)
    given = g.copy(), before.copy()
    residual = before - np.where(before >= 0, s, -s)
    want = g + residual
    for streaming in (False, True):
        room = aligned_empty(n + 16, dtype)
        room[:] = 77
        bits, sums = np.full(-(-n // 64), 99, np.uint64), np.full(-(-n // 4096), np.nan)
        compensate_and_pack(g, before, s, streaming, room[:n], bits, sums)
        np.testing.assert_array_equal(room[:n], want)
        assert (room[n:] == 77).all()
        np.testing.assert_array_equal(bits, pack_bits(want >= 0))
        np.testing.assert_array_equal(sums, magnitudes(want))
    np.testing.assert_array_equal(g, given[0])
    np.testing.assert_array_equal(before, given[1])
    settle(before, s)
    np.testing.assert_array_equal(before, residual)


def test_negative_zero_counts_as_zero() -> None:
    for n in (10, 100):
        zeros, after = np.full(n, -0.0, np.float32), np.empty(n, np.float32)
        bits, sums = np.zeros(-(-n // 64), np.uint64), np.zeros(1)
        compensate_and_pack(zeros, zeros, np.float32(0), False, after, bits, sums)
        assert np.bitwise_count(bits).sum() == n
        compensate_and_pack(zeros, zeros, np.float32(2), False, after, bits, sums)
        assert (after == -2).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sums_show_what_is_not_finite(bad: float) -> None:
    for n, position in ((40, 5), (5000, 4998), (5000, 100), (5000, 4096)):
        g, after = values(n, np.float32, 0), np.empty(n, np.float32)
        g[position] = bad
        bits, sums = np.zeros(-(-n // 64), np.uint64), np.zeros(-(-n // 4096))
        compensate_and_pack(g, values(n, np.float32, 1), np.float32(1), False, after, bits, sums)
        assert np.flatnonzero(~np.isfinite(sums)).tolist() == [position // 4096]
