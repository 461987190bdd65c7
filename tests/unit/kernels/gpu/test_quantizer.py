"""Stochastic levels on the GPU: the CPU's codes, from the same random words, and its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpicomp.kernels.cpu.bucketed import L2, LINF
from mpicomp.kernels.cpu.quantizer import WORDS
from mpicomp.kernels.streams import Stream, source
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, numbers

SHIFT = np.uint64(0xC0FFEE42 << 32)  # is added to each word of correlated draws

CASES = ((1000, 512), (0, 7), (1, 1), (9, 4), (65, 64), (513, 100), (4097, 1024), (4200, 2**40))


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls the quantizer's kernels on both devices."""
    return SideBySide("quantizer", to_device, to_host)


@FLOATS
@pytest.mark.parametrize(("levels", "negative", "first"), [(1, 1, 0), (7, 8, 16 * 1001), (127, 128, 2**41 + 4096)])
def test_codes_are_the_cpus(both: SideBySide, dtype: Any, levels: int, negative: int, first: int) -> None:
    schedule, step = Stream(3, 1, "levels").schedule(), np.uint64(17)
    for n, bucket in CASES:
        x = numbers(n, dtype)
        scales = np.abs(numbers(-(-n // bucket), np.float32, 1)) + np.float32(0.5)
        scales[1::3] = 0
        scales[2::7] = np.inf
        given = schedule, np.uint64(first), step, source(5, 2) | SHIFT, x, bucket, scales, levels, negative
        codes = both("quantize", *given, np.zeros(WORDS, np.uint64), np.zeros(n, np.uint8), host=(0, 9), offset=n % 4)[
            -1
        ]
        assert n < 500 or codes.any()


def test_what_is_not_finite_has_the_cpus_codes(both: SideBySide) -> None:
    x = np.tile(np.array([np.nan, np.inf, -np.inf, -np.nan, 1, -1, 1e-45], np.float32), 9)
    scales = np.array([1, np.inf, np.nan, -1, 1e-45, 3, 0], np.float32)
    given = Stream(0, 0, "levels").schedule(), np.uint64(0), np.uint64(1), source(0), x, 9, scales, 7, 8
    both("quantize", *given, np.zeros(WORDS, np.uint64), np.zeros(x.size, np.uint8), host=(0, 9))


def planes(n: int, levels: int, seed: int = 0) -> NDArray[np.uint64]:
    """Bit planes of codes of any kind."""
    rng = np.random.default_rng([n, seed])
    return rng.integers(0, 2**64, (levels.bit_length() + 1, -(-n // 64)), np.uint64)


@pytest.mark.parametrize(
    ("levels", "negative", "norm", "dtype", "told"),
    [
        (1, 2, L2, np.float32, False),
        (1, 2, LINF, np.float64, True),
        (1, 2, None, np.float32, True),
        (7, 8, L2, np.float64, True),
        (7, 8, LINF, np.float32, False),
        (7, 8, None, np.float64, False),
        (127, 128, L2, np.float32, True),
        (127, 128, LINF, np.float64, True),
        (127, 128, None, np.float64, False),
        (127, 128, LINF, np.float32, False),
    ],
)
def test_codes_in_planes_are_the_cpus(
    both: SideBySide, levels: int, negative: int, norm: int | None, dtype: Any, told: bool
) -> None:
    """Any two of levels, norm, type and `told` meet in a case."""
    at = Stream(3, 1, "levels").schedule(), np.uint64(16 * 1001), np.uint64(17), source(5, 2) | SHIFT
    for n, bucket in CASES:
        sent, scales = np.full(n, 7, dtype) if told else None, np.abs(numbers(-(-n // bucket), np.float32, 1))
        given = numbers(n, dtype), bucket, norm, scales, levels, negative, np.zeros(WORDS, np.uint64)
        both("encode", *at, *given, sent, planes(n, levels), host=(0, 10), offset=n % 4)


@FLOATS
@pytest.mark.parametrize("strange", [np.nan, -np.inf])
@pytest.mark.parametrize("norm", [L2, LINF])
def test_encoding_tells_of_what_is_not_finite(both: SideBySide, dtype: Any, strange: float, norm: int) -> None:
    x = numbers(1000, dtype)
    x[777] = strange
    at = Stream(3, 1, "levels").schedule(), np.uint64(0), np.uint64(17), source(5, 2)
    given = x, 100, norm, np.zeros(10, np.float32), 7, 8, np.zeros(WORDS, np.uint64)
    both("encode", *at, *given, None, planes(1000, 7), host=(0, 10))
    assert not both.cpu.encode(*at, *given, None, planes(1000, 7))


@FLOATS
@pytest.mark.parametrize(("levels", "negative"), [(1, 1), (7, 8), (127, 128)])
@pytest.mark.parametrize("adding", [False, True])
def test_values_are_the_cpus_whatever_the_codes(
    both: SideBySide, dtype: Any, levels: int, negative: int, adding: bool
) -> None:
    for n, bucket in CASES:
        codes = np.random.default_rng(n).integers(0, 256, n, np.uint8)
        scales = numbers(-(-n // bucket), np.float32, 1)
        scales[2::5], scales[3::5] = np.inf, np.nan
        out = numbers(n, dtype, 2)
        both("dequantize", codes, bucket, scales, levels, negative, out, adding, offset=n % 4)
        work = np.zeros(WORDS, np.uint64)
        given = planes(n, levels), bucket, scales, levels, negative, work, out, adding
        both("decode", *given, host=(5,), offset=n % 4)
