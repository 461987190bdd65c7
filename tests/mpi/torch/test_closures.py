"""Closures that the wrapped optimizer evaluates more than once, under "updates"."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives import Communicator
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer
from tests.mpi.torch.training import batch, make_model, on_all_ranks, parameters_of


def lbfgs_steps(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, n_steps: int) -> None:
    inputs, labels = batch(seed)

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return float(loss.detach())

    for _ in range(n_steps):
        optimizer.step(closure)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=4)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_the_common_model_moves_by_the_mean_of_all_that_the_ranks_moved(comm: Communicator, local_steps: int) -> None:
    model, alone = make_model(), make_model()
    optimizer = DistributedOptimizer(lbfgs(model), Dense(), comm, synchronize="updates", local_steps=local_steps)
    lbfgs_steps(model, optimizer, comm.rank, local_steps)
    lbfgs_steps(alone, lbfgs(alone), comm.rank, local_steps)
    mean = torch.stack(on_all_ranks(parameters_of(alone), comm)).mean(0)
    torch.testing.assert_close(parameters_of(model), mean)
    lbfgs_steps(model, optimizer, comm.rank, local_steps)
    assert all(torch.equal(other, parameters_of(model)) for other in on_all_ranks(parameters_of(model), comm))


def test_each_evaluation_sees_16_bit_parameters_where_their_masters_are(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    inner = torch.optim.LBFGS([parameter], lr=1.0, max_iter=10, line_search_fn="strong_wolfe")
    optimizer = DistributedOptimizer(inner, Dense(), comm, synchronize="updates")
    seen: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((parameter.float() - 3) ** 2).sum()
        loss.backward()
        seen.append(float(parameter.detach()[0]))
        return float(loss.detach())

    optimizer.step(closure)
    assert len(set(seen)) > 1
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 3.0))
