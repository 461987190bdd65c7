"""Fragments: which tensors belong together, and when they are sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpicomp.torch.local_steps.fragments import FragmentPlan, deal_fragments, layer_of
from mpicomp.torch.parameters import NamedParameter


def members(*names: str) -> list[NamedParameter]:
    return [NamedParameter(name, torch.zeros(1)) for name in names]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.weight", "transformer.h.3"),
        ("0.weight", "0"),
        ("blocks.11.mlp.0.bias", "blocks.11"),
        ("embedding.weight", "embedding"),
        ("scale", "scale"),
        ("group 0, parameter 3", "group 0, parameter 3"),
        ("layer4.conv1.weight", "layer4.conv1"),
    ],
)
def test_a_layer_is_a_numbered_block_or_a_module(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_layers_are_dealt_in_turn() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(5)]
    named = [NamedParameter(name, one) for name, one in nn.Sequential(*layers).named_parameters()]
    dealt = deal_fragments(named, 2)
    assert {(name.split(".")[0], number) for name, number in dealt.items()} == {(str(i), i % 2) for i in range(5)}


def test_tensors_are_dealt_where_there_are_few_layers() -> None:
    assert deal_fragments(members("a.w", "a.b", "c.w"), 3) == {"a.w": 0, "a.b": 1, "c.w": 2}
    assert set(deal_fragments(members("a", "b", "c"), 1).values()) == {0}


@pytest.mark.parametrize(
    ("steps", "fragments", "turns"),
    [(4, 2, [0, 2]), (3, 3, [0, 1, 2]), (10, 3, [0, 3, 6]), (7, 4, [0, 1, 3, 5]), (5, 1, [0])],
)
def test_fragments_are_sent_at_equal_distances_rounded_down(steps: int, fragments: int, turns: list[int]) -> None:
    plan = FragmentPlan(steps, fragments)
    sent = {turn: plan.due(turn) for turn in range(2 * steps)}
    expected = {turn: [turns.index(turn % steps)] if turn % steps in turns else [] for turn in range(2 * steps)}
    assert sent == expected
