"""Parameters that are frozen while an optimizer trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import Communicator
from mpicomp import Dense, DoubleSqueeze, Marsit
from tests.mpi.lanes import up_to_four_ranks
from tests.mpi.torch.branches import (
    Branches,
    modes,
    sgd,
    train,
    values,
    wrap,
)
from tests.mpi.torch.training import batch, same_on_all_ranks

pytestmark = up_to_four_ranks


@modes
@pytest.mark.parametrize("algorithm", [Dense(), DoubleSqueeze(), Marsit(3)], ids=str)
def test_frozen_parameters_rest_and_go_on_when_they_are_unfrozen(
    algorithm: Any, options: dict[str, Any], comm: Communicator
) -> None:
    """Weight decay, momentum and residuals do not move them; the optimizer keeps its state."""
    model = Branches()
    optimizer = wrap(model, model.parameters(), algorithm, comm, **options)
    train(model, optimizer, comm, range(3))
    model.new[0].requires_grad_(False)
    weight, bias = model.new[0].parameters()
    before = values(model.new[0])
    momentum = optimizer.state[weight]["momentum_buffer"].clone()
    train(model, optimizer, comm, range(3, 7))
    assert torch.equal(values(model.new[0]), before)
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], momentum)
    assert weight.grad is None
    assert bias.grad is None
    assert same_on_all_ranks(model, comm)
    model.new[0].requires_grad_(True)
    train(model, optimizer, comm, range(7, 9))
    assert not torch.equal(values(model.new[0]), before)
    assert same_on_all_ranks(model, comm)
    assert optimizer.synchronizations == 9


@modes
def test_dense_training_with_frozen_parameters_is_that_of_plain_torch(
    options: dict[str, Any], comm: Communicator
) -> None:
    models = [Branches(), Branches()]
    optimizer = wrap(models[0], models[0].parameters(), Dense(), comm, **options)
    plain = sgd(models[1].parameters())
    for step in range(8):
        for model, one in zip(models, (optimizer, plain), strict=True):
            model.old[0].requires_grad_(step < 2 or step > 5)
            model.new[2].bias.requires_grad_(step % 2 == 0)
            one.zero_grad()
            model.loss(*batch(step)).backward()
            one.step()
    torch.testing.assert_close(values(models[0]), values(models[1]))


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_frozen_in_the_middle_of_local_steps_keep_the_common_values(
    overlap: bool, comm: Communicator
) -> None:
    model = Branches()
    options = {"synchronize": "updates", "local_steps": 3, "overlap": overlap}
    optimizer = wrap(model, model.parameters(), Dense(), comm, **options)
    train(model, optimizer, comm, range(3))
    common = values(model.new)
    train(model, optimizer, comm, range(3, 4))
    model.new.requires_grad_(False)
    train(model, optimizer, comm, range(4, 6))
    assert torch.equal(values(model.new), common)
    assert same_on_all_ranks(model, comm)


def test_a_frozen_fragment_rests(comm: Communicator) -> None:
    model = Branches()
    options = {"synchronize": "updates", "local_steps": 4, "fragments": 2, "outer": (0.7, 0.6)}
    optimizer = wrap(model, model.parameters(), DoubleSqueeze(), comm, **options)
    train(model, optimizer, comm, range(8))
    optimizer.synchronize()
    before = values(model.new)
    model.new.requires_grad_(False)
    train(model, optimizer, comm, range(8, 16))
    optimizer.synchronize()
    assert torch.equal(values(model.new), before)
    assert same_on_all_ranks(model, comm)
