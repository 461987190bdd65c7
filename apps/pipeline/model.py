"""A character model like GPT, cut into stages: causal transformer blocks between an embedding and a head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock
from zlib import crc32

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from apps.pipeline.text import SYMBOLS

_SEEDING = Lock()  # ranks may be threads, which share torch's generator


@dataclass(frozen=True)
class Shape:
    """Shape of a model: blocks, their width and heads, and the characters that it reads at once."""

    layers: int = 4
    width: int = 64
    heads: int = 4
    context: int = 64


class Embedding(nn.Module):
    """Characters and their places: int64[examples, context] -> float32[examples, context, width]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.symbols = nn.Embedding(len(SYMBOLS), shape.width)
        self.places = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        nn.init.normal_(self.symbols.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """See the class."""
        embedded: Tensor = self.symbols(tokens) + self.places[: tokens.shape[1]]
        return embedded


class Block(nn.Module):
    """Attention to earlier characters, then a network of each character; normalised before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # no dropout: it would keep differences of activations from shrinking
        self.layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        later = torch.full((shape.context, shape.context), -torch.inf).triu(1)
        self.register_buffer("later", later, persistent=False)

    def forward(self, activations: Tensor) -> Tensor:
        """float32[examples, context, width] -> the same."""
        length = activations.shape[1]
        mask = self.get_buffer("later")[:length, :length]
        out: Tensor = self.layer(activations, src_mask=mask, is_causal=True)
        return out


class Head(nn.Module):
    """Scores of the next character: float32[examples, context, width] -> float32[examples, context, symbols]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(shape.width), nn.Linear(shape.width, len(SYMBOLS))

    def forward(self, activations: Tensor) -> Tensor:
        """See the class."""
        scores: Tensor = self.scores(self.norm(activations))
        return scores


def slice_of(shape: Shape, stage: int, stages: int, seed: int) -> nn.Sequential:
    """Return the part of a stage; however many stages there are, all have the same weights under the same names."""
    if stages > shape.layers:
        raise ValueError(f"{shape.layers} blocks cannot be spread over {stages} stages: take --layers {stages} or more")
    ends = [shape.layers * k // stages for k in range(stages + 1)]
    parts: list[tuple[str, type[nn.Module]]] = [(f"block{k}", Block) for k in range(ends[stage], ends[stage + 1])]
    if stage == 0:
        parts.insert(0, ("embedding", Embedding))
    if stage == stages - 1:
        parts.append(("head", Head))
    return nn.Sequential(OrderedDict((name, _seeded(name, kind, shape, seed)) for name, kind in parts))


def read_weights(path: str, shape: Shape) -> dict[str, Tensor]:
    """The weights of a whole model, from a file. OSError if it cannot be read, ValueError if it is another model's."""
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no file of weights ({error}): write one with --save") from error
    expected = slice_of(shape, 0, 1, 0).state_dict()
    wrong = [name for name, one in expected.items() if name not in weights or weights[name].shape != one.shape]
    if wrong:
        raise ValueError(f"{path} holds no weights of this model ({wrong[0]}): give the options of the run with --save")
    return weights


def load_weights(part: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a slice its part of the weights of a whole model."""
    part.load_state_dict({name: weights[name] for name in part.state_dict()})


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a character, in nats."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _seeded(name: str, kind: type[nn.Module], shape: Shape, seed: int) -> nn.Module:
    """A part with weights that depend on the seed and its name alone."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(f"{seed} {name}".encode()))
        return kind(shape)
