"""Stochastic levels on the GPU: the CPU's codes, from the same random words, and its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.streams import Stream, source
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, numbers

CASES = ((0, 7), (1, 1), (9, 4), (65, 64), (513, 100), (1000, 512), (4097, 1024), (9000, 2**40))


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
        given = schedule, np.uint64(first), step, source(5, 2), x, bucket, scales, levels, negative
        codes = both("quantize", *given, np.zeros(2048, np.uint64), np.zeros(n, np.uint8), host=(0, 9), offset=n % 4)[
            -1
        ]
        assert n < 500 or codes.any()


def test_what_is_not_finite_has_the_cpus_codes(both: SideBySide) -> None:
    x = np.tile(np.array([np.nan, np.inf, -np.inf, -np.nan, 1, -1, 1e-45], np.float32), 9)
    scales = np.array([1, np.inf, np.nan, -1, 1e-45, 3, 0], np.float32)
    given = Stream(0, 0, "levels").schedule(), np.uint64(0), np.uint64(1), source(0), x, 9, scales, 7, 8
    both("quantize", *given, np.zeros(2048, np.uint64), np.zeros(x.size, np.uint8), host=(0, 9))


@FLOATS
@pytest.mark.parametrize(("levels", "negative"), [(1, 1), (7, 8), (127, 128)])
def test_values_are_the_cpus_whatever_the_codes(both: SideBySide, dtype: Any, levels: int, negative: int) -> None:
    for n, bucket in CASES:
        codes = np.random.default_rng(n).integers(0, 256, n, np.uint8)
        scales = numbers(-(-n // bucket), np.float32, 1)
        scales[2::5], scales[3::5] = np.inf, np.nan
        both("dequantize", codes, bucket, scales, levels, negative, np.full(n, 7, dtype), offset=n % 4)
