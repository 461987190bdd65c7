"""Hooks report gradients one at a time, with any threads of backward; sums of bits show changed gradients."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mpicomp.torch.synchronizer.gradient_hooks import GradientCounts, _sum_of_bits, install_hooks


class Listener:
    """Takes long over each gradient, and counts those reported at once."""

    def __init__(self) -> None:
        self.gradient_counts = GradientCounts(["a", "b"], 1)
        self.reported = self.most = self.now = 0

    def gradient_came(self, position: int) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.05)
        self.now -= 1
        self.reported += 1


def test_gradients_of_two_threads_are_reported_one_after_the_other() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    listener = Listener()
    install_hooks(listener, parameters)
    threads = [threading.Thread(target=lambda one=one: one.sum().backward()) for one in parameters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (listener.reported, listener.most) == (2, 1)


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
