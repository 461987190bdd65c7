"""Numbers of buckets on the GPU: the CPU's sums, scales, signs and what is left, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu.bucketed import L1, L2, LINF
from tests.unit.kernels.gpu.side_by_side import FLOATS, SideBySide, numbers, words

# elements, and elements of a bucket
CASES = (
    (1000, 512), (0, 7), (1, 1), (9, 4), (65, 64), (40, 1), (513, 100), (4097, 1024), (4200, 4097), (4400, 1500),
    (4200, 2**40),
)  # fmt: skip
KINDS = pytest.mark.parametrize("kind", [L2, L1, LINF], ids=["l2", "l1", "linf"])


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls the kernels of buckets on both devices."""
    return SideBySide("bucketed", to_device, to_host)


def count(n: int, bucket: int) -> int:
    return -(-n // bucket)


@FLOATS
@KINDS
def test_norms_are_the_cpus(both: SideBySide, kind: int, dtype: Any) -> None:
    for n, bucket in CASES:
        both("norms", numbers(n, dtype), bucket, kind, np.full(count(n, bucket), 7.0), offset=n % 4)


@FLOATS
def test_a_bucket_with_nan_has_none_but_that_as_its_norm(both: SideBySide, dtype: Any) -> None:
    for n, bucket in CASES:
        x = numbers(n, dtype)
        x[n // 2 :: 1000] = np.nan
        x[n // 3 :: 1000] = -np.inf
        both("norms", x, bucket, LINF, np.full(count(n, bucket), 7.0))


@FLOATS
@pytest.mark.parametrize("clip", [None, 2.5, 0.3])
def test_clipped_scales_are_the_cpus(both: SideBySide, dtype: Any, clip: float | None) -> None:
    for n, bucket in CASES:
        x, scales = numbers(n, dtype), np.full(count(n, bucket), 7.0, np.float32)
        both("clipped_scales", x, bucket, clip, scales, offset=n % 4)
        x[n // 2 :: 1000] = np.nan
        x[n // 3 :: 1000] = -np.inf
        both("clipped_scales", x, bucket, clip, scales, offset=n % 4)


@FLOATS
def test_sums_of_sides_are_the_cpus(both: SideBySide, dtype: Any) -> None:
    for n, bucket in CASES:
        buckets = count(n, bucket)
        room = np.full(buckets, 7.0), np.full(buckets, 7.0), np.full(buckets, 7)
        both("side_sums", numbers(n, dtype), bucket, *room, offset=n % 4)


@FLOATS
@pytest.mark.parametrize("adding", [False, True])
@pytest.mark.parametrize("kinds", [1, 2])
def test_spread_numbers_are_the_cpus(both: SideBySide, dtype: Any, adding: bool, kinds: int) -> None:
    for n, bucket in CASES:
        given = numbers(kinds * count(n, bucket), np.float32, 1).reshape(kinds, -1)
        given[:, 1::5], given[:, 2::5], given[:, 3::5] = np.nan, -np.inf, -0.0
        both("spread", words(n), given, bucket, numbers(n, dtype, 3), adding, offset=n % 4)


@FLOATS
@KINDS
def test_kept_signs_are_the_cpus(both: SideBySide, kind: int, dtype: Any) -> None:
    for n, bucket in CASES:
        arrays = numbers(n, dtype), numbers(n, dtype, 1), np.full(n, 7, dtype), words(n)
        both("keep_signs", *arrays, np.full((1, count(n, bucket)), 7, np.float32), bucket, kind, offset=n % 4)


@FLOATS
def test_kept_sides_are_the_cpus(both: SideBySide, dtype: Any) -> None:
    for n, bucket in CASES:
        arrays = numbers(n, dtype), numbers(n, dtype, 1), np.full(n, 7, dtype), words(n)
        both("keep_sides", *arrays, np.full((2, count(n, bucket)), 7, np.float32), bucket, offset=n % 4)


@FLOATS
def test_what_is_kept_of_numbers_beyond_float32_and_of_zeros_is_the_cpus(both: SideBySide, dtype: Any) -> None:
    """Some of it is not finite, so that it is returned that not all is."""
    n, bucket = 700, 100
    x, residual = np.zeros((2, n), dtype)
    x[::2] = residual[1::3] = -0.0
    x[100:200] = np.finfo(dtype).max
    x[250], x[350], x[450] = np.inf, np.nan, -np.inf
    x[500:600] = np.finfo(np.float32).smallest_subnormal
    for part in (slice(0, 100), slice(500, 700), slice(0, 200), slice(None)):
        arrays = x[part], residual[part], np.full(n, 7, dtype)[part], words(n)[: -(-x[part].size // 64)]
        for kind in (L2, L1):
            both("keep_signs", *arrays, np.zeros((1, count(x[part].size, bucket)), np.float32), bucket, kind)
        both("keep_sides", *arrays, np.zeros((2, count(x[part].size, bucket)), np.float32), bucket)
