"""Bit planes, and bytes of float32 numbers, on the GPU: the CPU's words, codes and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpicomp.kernels.cpu.planes import powers_of_two
from tests.unit.kernels.gpu.side_by_side import SideBySide, words


@pytest.fixture
def both(to_device: Any, to_host: Any) -> SideBySide:
    """Give what calls the kernels of bit planes on both devices."""
    return SideBySide("planes", to_device, to_host)


@pytest.mark.parametrize(("dtype", "bits"), [(np.uint8, 1), (np.uint8, 8), (np.uint16, 11), (np.uint16, 16)])
def test_planes_and_codes_are_the_cpus(both: SideBySide, dtype: Any, bits: int) -> None:
    powers = powers_of_two(bits, dtype)
    for n in (0, 1, 63, 64, 65, 1000, 4097):
        codes = np.random.default_rng(n).integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True)
        planes = np.stack([words(n, j) for j in range(bits)])
        both("pack_planes", codes, powers, planes, host=(1,), offset=n % 4)
        both("unpack_planes", planes, powers, codes, host=(1,), offset=n % 4)


def test_codes_of_32_bits_keep_their_highest_bit(both: SideBySide) -> None:
    powers = powers_of_two(32, np.uint32)
    codes = np.random.default_rng(0).integers(0, 2**32, 1100, np.uint32)
    planes = both("pack_planes", codes, powers, np.zeros((32, 18), np.uint64), host=(1,))[2]
    assert planes[31].any()
    both("unpack_planes", planes, powers, np.zeros_like(codes), host=(1,))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_columns_and_words_are_the_cpus(both: SideBySide, count: int) -> None:
    for n in (0, 1, 9, 1000, 1024, 1025):
        rng = np.random.default_rng(n)
        numbers = rng.integers(0, 2**32, n, np.uint32)
        columns = both("split_bytes", numbers, np.zeros((count, n), np.uint8), offset=n % 4)[1]
        columns[:1, ::7], columns[1:2, ::7] = 0x7F, 0x80 | columns[1:2, ::7]  # NaN and infinity
        for rest in (None, rng.integers(0, 16, n, np.uint8)):
            both("join_bytes", columns, rest, 28 - 8 * min(count, 3), np.full(n, 7, np.uint32), offset=n % 4)
