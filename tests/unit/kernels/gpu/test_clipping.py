"""Bytes of float32 numbers on the GPU: the CPU's columns and words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.kernels.gpu.side_by_side import SideBySide


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_columns_and_words_are_the_cpus(to_device: Any, to_host: Any, count: int) -> None:
    both = SideBySide("clipping", to_device, to_host)
    for n in (0, 1, 9, 1000, 1024, 1025):
        rng = np.random.default_rng(n)
        numbers = rng.integers(0, 2**32, n, np.uint32)
        columns = both("split_bytes", numbers, np.zeros((count, n), np.uint8), offset=n % 4)[1]
        columns[:1, ::7], columns[1:2, ::7] = 0x7F, 0x80 | columns[1:2, ::7]  # NaN and infinity
        for rest in (None, rng.integers(0, 16, n, np.uint8)):
            both("join_bytes", columns, rest, 28 - 8 * min(count, 3), np.full(n, 7, np.uint32), offset=n % 4)
