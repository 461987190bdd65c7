"""Error of a one-bit vote among ranks and among the means of nodes, in a training that applies the exact mean.

A vote among the signs of vectors returns +s or -s for each element, s being their mean magnitude, and +s with the share
of positive signs as its probability. Its squared error has two parts: the *noise* of the draw, which voters that agree
lessen, and the *magnitude*, since all elements of a tensor get the same one, which no voter changes.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from apps.records import Record
from apps.studies.results import Results
from apps.train.data import load
from apps.train.models import build

HIDDEN, BATCH = 256, 32
STEPS, FIRST, EVERY = 400, 200, 20
"""Steps of a training, the first one whose vote is looked at, and the steps from one vote to the next."""
_load = cache(load)


def errors(vectors: Tensor, mean: Tensor) -> tuple[float, float]:
    """Return the noise and the magnitude part of the squared error of a vote, over the mean's square.

    `vectors` are those of the voters, one in a row, of one tensor.
    """
    size = vectors.abs().mean()
    vote = vectors.sign().mean(0)
    whole = mean.square().sum()
    noise = (size.square() * (1 - vote.square())).sum() / whole
    return float(noise), float((size * vote - mean).square().sum() / whole)


def measure(results: Results, dataset: str, rate: tuple[str, float], ranks: int, per_node: int, seed: int) -> Record:
    """Return the parts of the error among ranks and among nodes, or read them if they are there."""
    optimizer, lr = rate
    settings = {"dataset": dataset, "optimizer": optimizer, "lr": lr, "ranks": ranks, "per_node": per_node,
                "seed": seed, "steps": [STEPS, FIRST, EVERY], "hidden": HIDDEN, "batch": BATCH}  # fmt: skip
    make = partial(_measure, dataset, rate, ranks, per_node, seed)
    return results.get(f"vote-{dataset}-{optimizer}-{lr:g}-{seed}", settings, make)


def _measure(dataset: str, rate: tuple[str, float], ranks: int, per_node: int, seed: int) -> Record:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    train = _load(dataset, None).train
    images, labels = torch.as_tensor(train.images), torch.as_tensor(train.labels)
    channels, height, width = images.shape[1:]
    model = build("mlp", (channels, height, width), 10, (HIDDEN,), None)
    parameters = [*model.parameters()]
    copies = [[one.detach().clone().requires_grad_() for one in parameters] for _ in range(ranks)]
    optimizers = [_optimizer(copy, *rate) for copy in copies]
    found: list[list[tuple[float, float]]] = []
    for step in range(STEPS):
        for copy, optimizer in zip(copies, optimizers, strict=True):
            chosen = torch.randint(len(images), (BATCH,))
            gradients = torch.autograd.grad(F.cross_entropy(model(images[chosen]), labels[chosen]), parameters)
            for own, gradient in zip(copy, gradients, strict=True):
                own.grad = gradient
            optimizer.step()
        with torch.no_grad():
            for tensor, (parameter, *owns) in enumerate(zip(parameters, *copies, strict=True)):
                updates = torch.stack([own - parameter for own in owns])
                mean = updates.mean(0)
                if step >= FIRST and step % EVERY == 0 and tensor == 0:  # the first layer, 99 % of all weights
                    nodes = updates.view(ranks // per_node, per_node, *mean.shape).mean(1)
                    found.append([errors(updates, mean), errors(nodes, mean)])
                parameter += mean
                for own in owns:
                    own.copy_(parameter)
    means = torch.tensor(found).mean(0).tolist()
    return {"ranks": means[0], "nodes": means[1]}


def _optimizer(parameters: list[Tensor], name: str, lr: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr)
    return torch.optim.SGD(parameters, lr, momentum=0.9)
