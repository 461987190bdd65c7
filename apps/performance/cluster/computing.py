"""What a training step computes besides the all-reduce: forward and backward of an MLP."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch.nn.functional import cross_entropy

from apps.train.models import build

SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 32


def hidden_units(n: int) -> int:
    """The width of two equal hidden layers, for which the MLP has nearest to `n` parameters."""
    inputs = SHAPE[1] * SHAPE[2]
    linear = inputs + CLASSES + 2  # per unit: weights in and out, two biases; between the layers its square
    return max(1, round((sqrt(linear**2 + 4 * max(0, n - CLASSES)) - linear) / 2))


def training_step(n: int, seed: int) -> Callable[[], int]:
    """Forward and backward, on one thread, of an MLP of about `n` parameters on a batch of `BATCH` images.

    The result of a call is how many elements the gradients have.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = build("mlp", SHAPE, CLASSES, [hidden_units(n)] * 2, None)
    images, labels = torch.rand(BATCH, *SHAPE), torch.randint(CLASSES, (BATCH,))

    def step() -> int:
        model.zero_grad()
        torch.autograd.backward(cross_entropy(model(images), labels))
        return sum(0 if one.grad is None else one.grad.numel() for one in model.parameters())

    return step
