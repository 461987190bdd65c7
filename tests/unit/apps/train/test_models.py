"""Every model fits every image it accepts."""

from __future__ import annotations

import pytest
import torch

from apps.train.models import MODELS, build


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("side", [8, 28])
def test_gives_a_score_per_class_and_a_gradient_per_parameter(name: str, side: int) -> None:
    model = build(name, (1, side, side), 7, hidden=(12,), width=None if name == "mlp" else 4)
    scores = model(torch.randn(3, 1, side, side))
    assert scores.shape == (3, 7)
    scores.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_hidden_and_width_set_the_layers() -> None:
    shapes = [tuple(p.shape) for p in build("mlp", (1, 8, 8), 10, hidden=(32, 16), width=None).parameters()]
    assert shapes == [(32, 64), (32,), (16, 32), (16,), (10, 16), (10,)]
    assert next(build("resnet20", (3, 8, 8), 10, hidden=None, width=5).parameters()).shape == (5, 3, 3, 3)


@pytest.mark.parametrize(("layers", "elements"), [(8, 75_002), (20, 269_434)])
def test_a_resnet_has_as_many_layers_as_its_name_says(layers: int, elements: int) -> None:
    model = build(f"resnet{layers}", (1, 28, 28), 10, hidden=None, width=None)
    weights = [p for p in model.parameters() if p.dim() > 1]
    assert len(weights) == layers
    assert sum(p.numel() for p in model.parameters()) == elements


def test_options_that_do_not_apply_are_refused() -> None:
    with pytest.raises(ValueError, match="--model mlp has none; use --hidden"):
        build("mlp", (1, 8, 8), 10, hidden=None, width=8)
    with pytest.raises(ValueError, match="images of 4 x 4 pixels are too small for --model alexnet"):
        build("alexnet", (1, 4, 4), 10, hidden=None, width=None)
