"""A model has the same weights in slices of any size, and looks at earlier characters alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from apps.pipeline.magnitudes import Magnitudes
from apps.pipeline.model import Shape, load_weights, read_weights, slice_of
from apps.pipeline.text import SYMBOLS

SHAPE = Shape(layers=3, width=8, heads=2, context=6)


def whole(stages: int) -> nn.Sequential:
    return nn.Sequential(*(slice_of(SHAPE, stage, stages, 5) for stage in range(stages)))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_slices_together_are_the_model(stages: int) -> None:
    tokens = torch.arange(12).reshape(2, 6)
    scores = whole(stages)(tokens)
    assert scores.shape == (2, 6, len(SYMBOLS))
    assert torch.equal(scores, whole(1)(tokens))


def test_a_character_is_told_from_earlier_ones_alone() -> None:
    tokens = torch.arange(6)[None]
    changed = tokens.clone()
    changed[0, 4] += 1
    model = whole(1)
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert differs.tolist() == [False] * 4 + [True] * 2


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be spread over 4 stages"):
        slice_of(SHAPE, 0, 4, 0)


def test_weights_of_a_model_fit_into_whatever_slices(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.safetensors")
    save_file(slice_of(SHAPE, 0, 1, 1).state_dict(), path)
    weights = read_weights(path, SHAPE)
    for stage in range(2):
        part = slice_of(SHAPE, stage, 2, 5)
        load_weights(part, weights)
        assert all(torch.equal(value, weights[name]) for name, value in part.state_dict().items())
    with pytest.raises(ValueError, match=r"weights.safetensors holds no weights of this model \(embedding"):
        read_weights(path, Shape(layers=3, width=16, heads=2))


def test_another_seed_gives_other_weights_and_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second = (slice_of(SHAPE, 0, 1, seed).get_parameter("embedding.places") for seed in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)


def test_magnitudes_are_those_of_activations_and_of_their_changes() -> None:
    module = nn.Identity()
    watched = Magnitudes(module, 3)
    with watched.of(np.array([2, 0])):
        module(torch.tensor([[1.0, -3.0]]))
        module(torch.tensor([[2.0, 2.0]]))
    with watched.of(np.array([0, 1])):
        module(torch.tensor([[2.5, 1.0], [7.0, 7.0]]))
    module.eval()
    module(torch.tensor([[100.0, 100.0]]))
    assert watched.activations == [2.0, (1.75 + 7) / 2]
    assert np.isnan(watched.changes[0])
    assert watched.changes[1] == 0.75
