"""Sums by which changes of gradients are found: each element counts, wherever it lies."""

from __future__ import annotations

import pytest
import torch

from mpicomp.torch.sent_gradients import _sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 33])
@pytest.mark.parametrize("start", [0, 1])
def test_every_element_counts_in_the_sum_of_bits(start: int, n: int, dtype: torch.dtype) -> None:
    values = torch.randn(n + 1, generator=torch.Generator().manual_seed(n)).to(dtype)[start : start + n]
    before = int(_sum_of_bits(values))
    for place in range(n):
        values[place].neg_()
        assert int(_sum_of_bits(values)) != before
        values[place].neg_()
        assert int(_sum_of_bits(values)) == before


def test_values_in_another_order_of_memory_have_a_sum() -> None:
    values = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before = int(_sum_of_bits(values))
    values[1, 2, 3, 4] += 1
    assert int(_sum_of_bits(values)) != before
