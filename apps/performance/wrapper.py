"""Cost of `DistributedOptimizer` where there is nothing to communicate: a loop on one rank, with and without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, Column, Part, Row, both, make_record
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import alternate

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

MOST_OVER = 1.02
SIDES = ("plain", "wrapped", "wrapped", "plain")
"""Two models each, since a model's place in memory alone makes a step some percent faster or slower."""


def measure(n: int, batch: int, repeats: int) -> Record | None:
    """Time steps of an MLP of about `n` parameters; collective."""
    import torch

    torch.set_num_threads(1)
    with Communicator() as comm:
        rows: list[Row] = []
        for name in ("SGD", "Adam"):
            models = {f"{side} {place}": side for place, side in enumerate(SIDES)}
            timed = alternate(
                {key: _step(comm, name, n, batch, side) for key, side in models.items()}, repeats, 1, comm
            )
            seconds = {side: np.concatenate([timed[key] for key in models if models[key] == side]) for side in SIDES}
            rows.append({"optimizer": name, **{side: summary(found) for side, found in seconds.items()}})
        record = make_record(rows, n=n, batch=batch, ranks=comm.size, repeats=repeats)
        return None if comm.rank else record


def _step(comm: Communicator, name: str, n: int, batch: int, side: str) -> Callable[[], None]:
    from mpicomp.torch import DistributedOptimizer

    model, optimizer = perceptron(name, n)
    if side == "wrapped":
        optimizer = DistributedOptimizer(optimizer, mpicomp.Dense(), comm, model.named_parameters())
    return partial(train_step, model, optimizer, inputs_of(model, batch))


def perceptron(name: str, n: int) -> tuple[Module, Optimizer]:
    """Return a network of about `n` parameters, and an optimizer of this name."""
    import torch

    width, layers = round((n / 12) ** 0.5), 12
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.ReLU()))
    )
    if name == "SGD":
        return model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    return model, torch.optim.Adam(model.parameters(), lr=1e-6)


def inputs_of(model: Module, batch: int) -> Tensor:
    """Return ``[batch, width]`` inputs of a network."""
    import torch

    return torch.ones(batch, next(model.parameters()).shape[1])


def train_step(model: Module, optimizer: Optimizer, inputs: Tensor) -> None:
    """Make one step of a training."""
    import torch

    optimizer.zero_grad()
    torch.autograd.backward(model(inputs).square().mean())
    optimizer.step()


COLUMNS: Sequence[Column] = (
    ("optimizer", lambda row: row["optimizer"]),
    ("plain, ms", lambda row: both(row["plain"], MS)),
    ("wrapped, ms", lambda row: both(row["wrapped"], MS)),
    ("over plain", lambda row: f"{row['wrapped']['median_s'] / row['plain']['median_s']:.3f}"),
    ("target", lambda row: f"≤ {MOST_OVER}"),
)
PART = Part(
    "wrapper",
    "A training step on one rank, with the optimizer wrapped and without.",
    measure,
    COLUMNS,
    quick={"n": 100_000, "batch": 8, "repeats": 2},
    full={"n": 25_000_000, "batch": 64, "repeats": 25},
    ranks=(1,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
