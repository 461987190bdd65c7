"""Rates from multiply-adds per gradient: the guidance's boundaries, and layers whose ratio is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpicomp.torch.layer_rates import compression_rates, flops_to_gradient, rate_of


class Net(nn.Module):
    """A convolution over 14 x 14 places, one over 8 x 8, one linear layer, and what is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.inner = nn.Sequential(nn.AdaptiveAvgPool2d(12), nn.Conv2d(8, 4, 1, bias=False))
        self.narrow = nn.Conv2d(4, 4, 5, bias=False)
        self.head = nn.Linear(4 * 64, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow(self.inner(self.norm(self.wide(x))))
        out: Tensor = self.head(y.flatten(1)) * self.scale
        return out


def test_boundaries_are_the_guidances() -> None:
    assert [rate_of(ratio) for ratio in (1e9, 196, 195.9, 128.1, 128, 1, 0)] == [25, 25, 50, 50, 400, 400, 400]


@pytest.mark.parametrize("batch", [32, 64])
def test_a_convolutions_ratio_is_its_output_places(batch: int) -> None:
    ratios = flops_to_gradient(Net(), [torch.zeros(batch, 3, 14, 14)])
    times = batch / 32
    assert ratios["wide.weight"] == 196 * times
    assert ratios["inner.1.weight"] == 144 * times
    assert ratios["narrow.weight"] == 64 * times
    assert ratios["head.weight"] == ratios["head.bias"] == pytest.approx(times * 2560 / 2570)
    assert ratios["norm.weight"] == ratios["norm.bias"] == ratios["scale"] == 0
    assert set(ratios) == {name for name, _ in Net().named_parameters()}


def test_rates_of_a_model() -> None:
    model = Net()
    model.narrow.weight.requires_grad_(False)
    rates = compression_rates(model, [torch.zeros(32, 3, 14, 14)])
    assert rates == {
        "wide.weight": 25,
        "norm.weight": 25,
        "norm.bias": 25,
        "inner.1.weight": 50,
        "head.weight": 400,
        "head.bias": 400,
        "scale": 25,
    }
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_may_be_one_layer_and_an_embedding_is_compressed_most() -> None:
    assert flops_to_gradient(nn.Linear(7, 3, bias=False), [torch.zeros(320, 7)]) == {"weight": 10}
    assert compression_rates(nn.Embedding(10, 4), [torch.zeros(32, dtype=torch.int64)]) == {"weight": 400}
