"""Models whose parameters are replaced after the optimizer was made: all ranks raise, or the silent rank warns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer, OneBitAdam
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.training import make_model, same_on_all_ranks, train, wrapped

pytestmark = few_ranks


def assign_all(model: nn.Module) -> None:
    model.load_state_dict({name: one.clone() for name, one in model.state_dict().items()}, assign=True)


def assign_one(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


def assign_a_module(model: nn.Module) -> None:
    model[2] = copy.deepcopy(model[2])


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"synchronize": "updates", "local_steps": 2}, {"momenta": True}], ids=str
)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("replace", [assign_all, assign_one, assign_a_module])
def test_a_parameter_that_was_replaced_in_its_module_is_named_by_all_ranks(
    replace: Callable[[nn.Module], None], everywhere: bool, options: dict[str, Any], comm: Communicator
) -> None:
    if options.get("momenta"):
        model = make_model()
        optimizer: Any = OneBitAdam(model.named_parameters(), comm=comm, named_parameters=model.named_parameters())
    else:
        model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    if everywhere or comm.rank == 0:
        replace(model)
    name = "0.weight" if replace is assign_all else "2.weight"
    with pytest.raises((ValueError, CollectiveMismatch), match=rf"parameter '{name}' was replaced in its module"):
        train(model, optimizer, comm, range(2, 4))


def test_parameters_that_are_put_back_or_frozen_train_on(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(2))
    own, bias = model[0].weight, model[2].bias
    model[0].weight = nn.Parameter(torch.zeros_like(own))  # as averages of weights are evaluated
    model[0].weight = own
    model[0] = nn.Sequential(model[0])  # as adapters wrap a layer
    model[1] = nn.Tanh()
    model[2].bias = nn.Parameter(torch.zeros_like(bias))
    bias.requires_grad_(False)
    optimizer.add_param_group({"params": [("new", model[2].bias)]})
    train(model, optimizer, comm, range(2, 5))
    assert same_on_all_ranks(model, comm)
    assert model[2].bias.any()


def warned(work: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_a_rank_that_trains_another_model_warns(mode: str, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode)
    train(model, optimizer, comm, range(2))
    trained = copy.deepcopy(model) if comm.rank == 0 else model
    found = warned(lambda: train(trained, optimizer, comm, range(2, 20)))
    assert [text.split(":")[0] for text in found] == [f"rank 0 of {comm.size}"] * (comm.rank == 0)
    assert all("no parameter had a gradient in the last 10 steps" in text for text in found)


def test_no_rank_warns_that_joins_or_has_gradients_by_hand(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)

    def batches() -> Iterator[int]:
        yield from range(1 + 15 * comm.rank)

    def join() -> None:
        for step in optimizer.join(batches()):
            train(model, optimizer, comm, range(step, step + 1))

    by_hand = nn.Parameter(torch.ones(3))
    other = DistributedOptimizer(torch.optim.SGD([by_hand], lr=0.1), Dense(), comm)

    def step() -> None:
        for _ in range(15):
            by_hand.grad = torch.ones(3)
            other.step()
            other.zero_grad()

    assert warned(join) == warned(step) == []


# Modules that swap their tensors --------------------------------------------------------------------------------------


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_a_module_that_swaps_its_tensors_is_converted(mode: str, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    model.double()
    with pytest.raises(ValueError, match=r"'0\.weight' was torch\.float32.* and is torch\.float64"):
        train(model, optimizer, comm, range(2, 3))


@pytest.mark.usefixtures("swapping")
def test_gradients_are_sent_during_backward_after_loading_by_swapped_tensors(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    model.load_state_dict(make_model(seed=5).state_dict())
    train(model, optimizer, comm, range(2, 4))
    optimizer.zero_grad()
    model(torch.ones(2, 10)).sum().backward()
    assert optimizer._synchronizer._early.queue.n_started
    optimizer.step()
    assert same_on_all_ranks(model, comm)
