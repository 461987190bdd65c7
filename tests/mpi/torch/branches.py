"""A model of two branches, one of which joins while the optimizer trains the other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.torch import DistributedOptimizer
from tests.mpi.torch.training import batch

GRADIENTS: dict[str, Any] = {"synchronize": "gradients"}
IN_TURN: dict[str, Any] = {"synchronize": "gradients", "overlap": False}
UPDATES: dict[str, Any] = {"synchronize": "updates"}
FUSED: dict[str, Any] = {"synchronize": "updates", "overlap": True}
modes = pytest.mark.parametrize(
    "options", [GRADIENTS, IN_TURN, UPDATES, FUSED], ids=["gradients", "in-turn", "updates", "fused"]
)
WIDTH = 24


class Branches(nn.Module):
    """Two branches whose losses are added, so that the gradients of one do not depend on the other."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.old = nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.new = nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.to(dtype)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return sum(nn.functional.cross_entropy(branch(inputs), labels) for branch in (self.old, self.new))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def wrap(model: nn.Module, parameters: Any, algorithm: Any, comm: Communicator, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(sgd(parameters), algorithm, comm, model.named_parameters(), bucket_mb=0.001, **options)


def backward(model: Branches, optimizer: torch.optim.Optimizer, comm: Communicator, step: int) -> None:
    inputs, labels = batch(1000 * comm.rank + step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    model.loss(inputs, labels).backward()


def train(model: Branches, optimizer: torch.optim.Optimizer, comm: Communicator, steps: range) -> None:
    for step in steps:
        backward(model, optimizer, comm, step)
        optimizer.step()


def values(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def add(model: Branches, optimizer: DistributedOptimizer) -> None:
    optimizer.add_param_group({"params": list(model.new.parameters())})


def unfreeze(model: Branches, optimizer: DistributedOptimizer) -> None:
    model.new.requires_grad_(True)


def started(
    how: Callable[..., None], algorithm: Any, comm: Communicator, **options: Any
) -> tuple[Branches, DistributedOptimizer]:
    """Return a model of which the old branch is trained, and its optimizer, to which `how` adds the new one."""
    model = Branches(options.pop("dtype", torch.float32))
    model.new.requires_grad_(how is add)
    optimizer = wrap(model, (model.old if how is add else model).parameters(), algorithm, comm, **options)
    return model, optimizer


ways = pytest.mark.parametrize("how", [add, unfreeze])


def in_order(state: object) -> object:
    """Return a state as lists in the alphabetical order of its keys, and tensors as types, shapes and bytes."""
    if isinstance(state, dict):
        return [(str(key), in_order(state[key])) for key in sorted(state, key=str)]
    if isinstance(state, list):
        return [in_order(one) for one in state]
    if isinstance(state, Tensor):
        return state.dtype, state.shape, state.detach().double().numpy().tobytes()
    return (state.dtype, state.shape, state.tobytes()) if isinstance(state, np.ndarray) else state
