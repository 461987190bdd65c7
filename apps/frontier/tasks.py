"""Tasks of the record: a model, the batches of each rank, and the score of the common model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apps.pipeline.model import Shape, loss, slice_of
from apps.pipeline.text import Corpus
from apps.pipeline.text import load as load_text
from apps.train.data import Dataset
from apps.train.data import load as load_images
from apps.train.models import build

SHAPE = Shape(layers=4, width=144)
CHARACTERS, HELD_OUT = 2_000_000, 300
"""Of the text, and sequences of its held-out part that are evaluated."""
SEQUENCES, IMAGES = 4, 16
"""Of one rank's batch."""
TESTED = 5000
"""Images of the test split that are evaluated."""

_SEEDING = Lock()  # ranks are threads, which share torch's generator


class Batch(NamedTuple):
    """Inputs and targets of one step on one rank."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Task:
    """A training that methods are compared by.

    Attributes
    ----------
    score : str
        Of the common model: ``"nats a character"``, where less is better, or ``"% of test images"``.
    rates : tuple of float
        Learning rates that are tried for each method.
    """

    name: str
    title: str
    score: str
    rates: tuple[float, ...]
    steps: int
    tuning_steps: int
    evaluated: int
    build: Callable[[int], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    draw: Callable[[np.random.Generator, int, int], Batch]
    evaluate: Callable[[nn.Module], float]

    @property
    def lower_is_better(self) -> bool:
        """True if the score is a loss."""
        return self.score.startswith("nats")

    @property
    def of_divergence(self) -> float:
        """The score of a training that ends in NaN."""
        return 100.0 if self.lower_is_better else 0.0


@cache
def _corpus() -> Corpus:
    return load_text(None, CHARACTERS, SHAPE.context)


@cache
def _images() -> Dataset:
    return load_images("fashion-mnist")


def _draw_text(random: np.random.Generator, rank: int, size: int) -> Batch:
    training = _corpus().training
    rows = torch.from_numpy(training[random.integers(0, len(training), SEQUENCES)])
    return Batch(rows[:, :-1], rows[:, 1:])


@torch.no_grad()
def _held_out_loss(model: nn.Module) -> float:
    rows = torch.from_numpy(_corpus().validation[:HELD_OUT])
    return float(loss(model(rows[:, :-1]), rows[:, 1:]))


def _gpt(seed: int) -> nn.Module:
    return slice_of(SHAPE, 0, 1, seed)


@cache
def _sorted_by_label() -> Tensor:
    return torch.argsort(_images().train.labels, stable=True)


def _draw_images(random: np.random.Generator, rank: int, size: int, *, sorted_by_label: bool) -> Batch:
    """Draw from all images, or from the rank's part of those in the order of their labels."""
    train = _images().train
    if sorted_by_label:
        part = len(train.labels) // size
        places = _sorted_by_label()[rank * part + torch.from_numpy(random.integers(0, part, IMAGES))]
    else:
        places = torch.from_numpy(random.integers(0, len(train.labels), IMAGES))
    return Batch(train.images[places], train.labels[places])


def _cnn(seed: int) -> nn.Module:
    with _SEEDING:
        torch.manual_seed(seed)
        return build("cnn", (1, 28, 28), 10, (128,), None)


@torch.no_grad()
def _accuracy(model: nn.Module) -> float:
    test = _images().test
    found = [model(images).argmax(1) for images in test.images[:TESTED].split(500)]
    return 100 * float((torch.cat(found) == test.labels[:TESTED]).float().mean())


def task_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy: of characters or of images."""
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def _adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=True)


def _momentum(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def _of_images(name: str, title: str, sorted_by_label: bool) -> Task:
    draw = partial(_draw_images, sorted_by_label=sorted_by_label)
    rates = (0.02, 0.05, 0.1)
    return Task(name, title, "% of test images", rates, 600, 300, 100, _cnn, _momentum, draw, _accuracy)


_GPT = "GPT of 1.04 million elements on characters, AdamW"
TASKS = {
    task.name: task
    for task in (
        Task(
            "gpt", _GPT, "nats a character", (1e-3, 2e-3, 4e-3), 600, 200, 100, _gpt, _adamw, _draw_text, _held_out_loss
        ),
        _of_images("cnn", "CNN on Fashion-MNIST, SGD with momentum 0.9", False),
        _of_images("sorted", "the same CNN, images sorted by label: each rank has three of ten labels or fewer", True),
    )
}
