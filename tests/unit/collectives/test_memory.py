"""Vectors on other people's memory."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from collectives.memory import PAGE, aligned_empty, flat


def test_a_vector_keeps_its_tensor_alive() -> None:
    tensor = torch.arange(10.0)
    values, alive = flat(tensor).values[2:], weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert values[0] == 2
    del values
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("n", [1, 1000, 100_000])
def test_buffers_begin_at_a_page(n: int) -> None:
    for alignment in (64, PAGE):
        made = aligned_empty(n, np.float64, alignment)
        assert made.ctypes.data % alignment == 0
        assert made.size == n
