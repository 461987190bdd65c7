"""A small language model over characters, cut into the stages of a pipeline: a load for benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apps.pipeline.model import Shape, loss, slice_of
from apps.pipeline.text import SYMBOLS
from mpicomp.pipeline import PipelineStage

HEAD_WIDTH, RATE = 32, 1e-3


@dataclass(frozen=True)
class Load:
    """Size of the model and of its batches."""

    context: int = 64  # characters of an example
    width: int = 128  # last dimension of activations
    blocks: int = 2  # of each stage
    examples: int = 8  # of a micro-batch
    micro_batches: int = 8  # of a batch
    batches: int = 1  # of an epoch

    @property
    def batch(self) -> int:
        """Examples of a batch."""
        return self.examples * self.micro_batches

    @property
    def epoch(self) -> int:
        """Examples of an epoch."""
        return self.batch * self.batches

    @property
    def rows(self) -> tuple[int, int]:
        """Shape of the activations of a micro-batch, one row for each character."""
        return self.examples * self.context, self.width

    def texts(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Characters of all examples of an epoch, drawn, and those that follow them."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(len(SYMBOLS), (self.epoch, self.context + 1), generator=generator)
        return drawn[:, :-1], drawn[:, 1:]


def trainer(
    stage: PipelineStage,
    load: Load,
    shuffled: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    replica: int = 0,
) -> Callable[[], None]:
    """Return a function that trains a stage on the next batch of the epoch; call it on all stages."""
    inputs, targets = load.texts(seed=replica)
    if optimizer is None:
        optimizer = torch.optim.SGD(stage.module.parameters(), RATE)
    # shuffled: in another order in each epoch; otherwise a batch always has the same examples
    draw, numbers = np.random.default_rng(0), cycle(range(load.batches))
    order = np.arange(load.epoch)

    def step() -> None:
        number = next(numbers)
        if shuffled and number == 0:
            draw.shuffle(order)
        ids = order[number * load.batch : (number + 1) * load.batch].copy()
        optimizer.zero_grad()
        stage.step(inputs[ids] if stage.is_first else None, targets[ids] if stage.is_last else None, ids)
        optimizer.step()

    return step


def module_and_loss(load: Load, stage: int, stages: int) -> tuple[nn.Module, Any]:
    """A stage's slice, and the loss where the stage is the last one."""
    shape = Shape(stages * load.blocks, load.width, max(1, load.width // HEAD_WIDTH), load.context)
    return slice_of(shape, stage, stages, seed=0), loss if stage == stages - 1 else None
