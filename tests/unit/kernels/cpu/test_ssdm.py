"""SSDM's passes: the reference's norms, momentum and signs, wherever a part begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.kernels.cpu.ssdm import norm as norm_of
from mpicomp.kernels.cpu.ssdm import squares, stochastic_signs
from mpicomp.kernels.streams import Stream
from tests.reference.signs import pack_bits
from tests.reference.stochastic_signs import sums_of_squares, uniforms

LENGTHS = (0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1000, 4095, 4096, 4097, 3 * 4096 + 65)
STREAM = Stream(2, 0, "stochastic sign")
STEP, SOURCE = 4, 5


def values(n: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    """Normal values that start off any alignment; some zeros of both signs."""
    x = np.empty(n + 3, dtype)[3:]
    x[:] = np.random.default_rng((n, seed)).standard_normal(n)
    x[::7], x[3::7] = 0.0, -0.0
    return x


def drawn(x: NDArray[Any], norm: float, first: int = 0, momentum: Any = None, beta: float = 0.0) -> NDArray[np.uint64]:
    kind = x.dtype.type
    bits = np.full(-(-x.size // 64), 99, np.uint64)
    where = (np.uint64(first), np.uint64(STEP), np.uint64(SOURCE))
    stochastic_signs(STREAM.schedule(), *where, x, momentum, momentum, kind(beta), kind(1 - beta), norm, bits)
    return bits


def expected(x: NDArray[Any], norm: float, first: int = 0) -> NDArray[np.uint64]:
    uniform = uniforms(STREAM.key(), first // 512, first % 512 + x.size, STEP, SOURCE)[first % 512 :]
    scale = 2.0**31 / norm if norm else 0.0
    return pack_bits(uniform < 2.0**31 + x.astype(np.float64) * scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_signs_equal_the_reference(dtype: Any) -> None:
    for n in LENGTHS:
        x = values(n, dtype)
        for norm in (0.0, 2.5, 300.0):
            np.testing.assert_array_equal(drawn(x, norm), expected(x, norm))


def test_a_value_as_long_as_the_norm_is_certain() -> None:
    for n in (64, 1000):
        assert np.bitwise_count(drawn(np.full(n, 3, np.float32), 3.0)).sum() == n
        assert not drawn(np.full(n, -3, np.float32), 3.0).any()


def test_signs_of_a_part_are_drawn_by_its_place() -> None:
    x = values(5000)
    for first in (64, 448, 512, 1024 + 64, 512 * (2**30 - 1) + 320):
        np.testing.assert_array_equal(drawn(x, 3.0, first), expected(x, 3.0, first))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_momentum_moves_and_is_what_signs_are_drawn_of(dtype: Any) -> None:
    for n in LENGTHS:
        g, momentum = values(n, dtype), values(n, dtype, 1)
        beta, gain = dtype(0.9), dtype(1 - 0.9)
        want = beta * momentum + gain * g
        before = momentum.copy()
        sums = np.full(-(-n // 4096), np.nan)
        squares(g, momentum, beta, gain, sums)
        np.testing.assert_array_equal(momentum, before, "the norm's pass changes nothing")
        np.testing.assert_array_equal(sums, sums_of_squares(want))
        np.testing.assert_array_equal(drawn(g, 2.5, 0, momentum, 0.9), expected(want, 2.5))
        np.testing.assert_array_equal(momentum, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_without_momentum_equal_the_reference(dtype: Any) -> None:
    for n in LENGTHS:
        x = values(n, dtype)
        sums = np.full(-(-n // 4096), np.nan)
        squares(x, None, dtype(0), dtype(1), sums)
        np.testing.assert_array_equal(sums, sums_of_squares(x))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_norms_are_sums_of_blocks_rounded_once(dtype: Any) -> None:
    for n in LENGTHS:
        x, out = values(n, dtype), np.full(1, np.nan, np.float32)
        norm_of(x, out)
        assert out[0] == np.float32(np.sqrt(sum(sums_of_squares(x).tolist())))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.full(3, np.finfo(np.float32).max, np.float32), np.finfo(np.float32).max),
        (np.full(3, 1e39), np.finfo(np.float32).max),
        (np.array([1, -np.inf], np.float32), np.inf),
        (np.array([np.nan, 1], np.float32), np.nan),
    ],
)
def test_norms_of_numbers_are_finite_and_others_not(x: NDArray[Any], expected: float) -> None:
    out = np.zeros(1, np.float32)
    norm_of(x, out)
    np.testing.assert_array_equal(out, np.float32(expected))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_squares_show_what_is_not_finite(bad: float) -> None:
    for n, position in ((40, 5), (40, 39), (5000, 4998), (5000, 100)):
        x = values(n)
        x[position] = bad
        sums = np.empty(-(-n // 4096))
        squares(x, None, np.float32(0), np.float32(1), sums)
        assert np.flatnonzero(~np.isfinite(sums)).tolist() == [position // 4096]
