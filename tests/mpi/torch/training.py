"""A small problem that all tests of the torch bridge train on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.torch import DistributedOptimizer

N_INPUTS, N_CLASSES = 10, 3
has_grad_dtype = pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="Parameter.grad_dtype is PyTorch 2.10's")


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(N_INPUTS, 37), nn.ReLU(), nn.Linear(37, N_CLASSES)).to(dtype)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs, and labels that a linear rule gives them."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, N_INPUTS, generator=generator)
    rule = torch.randn(N_INPUTS, N_CLASSES, generator=torch.Generator().manual_seed(99))
    return inputs.to(dtype), (inputs @ rule).argmax(1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, steps: range) -> None:
    """Each rank on its own batches."""
    for step in steps:
        inputs, labels = batch(1000 * comm.rank + step, next(model.parameters()).dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def wrap(
    model: nn.Module, algorithm: object, comm: Communicator, optimizer: str = "momentum", **options: object
) -> DistributedOptimizer:
    """The model's optimizer, distributed over buckets of 1 kB, hence several."""
    inner = (
        torch.optim.Adam(model.parameters(), lr=0.005)
        if optimizer == "adam"
        else torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    )
    return DistributedOptimizer(inner, algorithm, comm, model.named_parameters(), bucket_mb=0.001, **options)


def wrapped(*arguments: Any, **options: object) -> tuple[nn.Module, DistributedOptimizer]:
    """A model, and its optimizer as `wrap` makes it."""
    model = make_model()
    return model, wrap(model, *arguments, **options)


def parameters_of(model: nn.Module) -> Tensor:
    """All parameters in one vector, a copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def on_all_ranks(vector: Tensor, comm: Communicator) -> list[Tensor]:
    """The vector of every rank."""
    return list(comm.mpi_comm.allgather(vector))


def same_on_all_ranks(model: nn.Module, comm: Communicator) -> bool:
    """Return whether all ranks have the same finite parameters."""
    mine = parameters_of(model)
    return bool(mine.isfinite().all()) and all(torch.equal(other, mine) for other in on_all_ranks(mine, comm))
