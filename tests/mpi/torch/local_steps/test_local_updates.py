"""DistributedOptimizer under "updates"."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense, Marsit, SparseLoCo
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import alone_too
from tests.mpi.torch.training import (
    batch,
    make_model,
    on_all_ranks,
    parameters_of,
    same_on_all_ranks,
    train,
    wrap,
    wrapped,
)

pytestmark = alone_too


def test_is_what_marsit_prefers_and_dense_does_not(comm: Communicator) -> None:
    assert wrap(make_model(), Marsit(), comm).mode == "updates"
    assert wrap(make_model(), Dense(), comm).mode == "gradients"


@pytest.mark.parametrize(("optimizer", "local_steps"), [("momentum", 3), ("adam", 1)])
def test_replicas_stay_equal_to_the_bit(comm: Communicator, optimizer: str, local_steps: int) -> None:
    model, distributed = wrapped(Marsit(full_precision_every=10), comm, optimizer, local_steps=local_steps)
    train(model, distributed, comm, range(30))
    assert distributed.synchronizations == 30 // local_steps
    assert same_on_all_ranks(model, comm)


def test_largest_elements_of_what_the_ranks_moved_are_applied(comm: Communicator) -> None:
    """SparseLoCo with all elements in float32 is the mean; with few, the first synchronization moves few elements."""
    models = [make_model() for _ in range(3)]
    dense, all_elements, few = Dense(), SparseLoCo(1, bits=32, decay=1.0), SparseLoCo(16, 64)
    for model, method in zip(models, (dense, all_elements, few), strict=True):
        train(model, wrap(model, method, comm, "adam", synchronize="updates", local_steps=5), comm, range(5))
        assert same_on_all_ranks(model, comm)
    start, mean, whole, sparse = map(parameters_of, (make_model(), *models))
    torch.testing.assert_close(whole, mean)
    moved = sum(-(-4 * (size // 64 * 64) // 64) + -(-4 * (size % 64) // 64) for size in (370, 37, 111, 3))
    assert moved <= int((sparse != start).sum()) <= moved * comm.size


@pytest.mark.parametrize("synchronize", ["updates", "gradients"])
def test_sparse_loco_trains_in_both_modes_and_resumes_exactly(comm: Communicator, synchronize: str) -> None:
    options = {"synchronize": synchronize, "local_steps": 3 if synchronize == "updates" else 1}
    model, optimizer = wrapped(SparseLoCo(16, 64), comm, "adam", **options)
    train(model, optimizer, comm, range(6))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(6, 12))
    assert same_on_all_ranks(model, comm)
    resumed = make_model(seed=5)
    again = wrap(resumed, SparseLoCo(16, 64), comm, "adam", **options)
    resumed.load_state_dict(parameters)
    again.load_state_dict(state)
    train(resumed, again, comm, range(6, 12))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_plain_sgd_is_the_same_in_both_modes_when_nothing_is_compressed(comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, mode in zip(models, ("gradients", "updates"), strict=True):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = DistributedOptimizer(inner, Dense(), comm, synchronize=mode)
        train(model, optimizer, comm, range(5))
    torch.testing.assert_close(parameters_of(models[0]), parameters_of(models[1]))


def test_the_common_model_moves_by_the_mean_of_what_the_ranks_moved(comm: Communicator) -> None:
    model, alone = make_model(), make_model()
    train(model, wrap(model, Dense(), comm, synchronize="updates", local_steps=4), comm, range(4))
    train(alone, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9), comm, range(4))
    local_models = on_all_ranks(parameters_of(alone), comm)
    torch.testing.assert_close(parameters_of(model), torch.stack(local_models).mean(0))


@pytest.mark.mpi(min_size=2)
def test_replicas_differ_within_a_round_and_synchronize_closes_it(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="updates", local_steps=10)
    train(model, optimizer, comm, range(3))
    assert optimizer.models_differ
    assert not torch.equal(*on_all_ranks(parameters_of(model), comm)[:2])
    optimizer.synchronize()
    assert not optimizer.models_differ
    assert torch.equal(*on_all_ranks(parameters_of(model), comm)[:2])
    assert optimizer.synchronizations == 1
    optimizer.synchronize()
    assert optimizer.synchronizations == 1


def test_a_model_loaded_between_rounds_is_not_taken_for_an_update(comm: Communicator) -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), Marsit(), comm)
    train(model, optimizer, comm, range(1))
    model.load_state_dict(make_model(seed=1).state_dict())
    train(model, optimizer, comm, range(1, 3))
    assert torch.equal(parameters_of(model), parameters_of(make_model(seed=1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_too_small_for_16_bits_accumulate_in_float32_masters(comm: Communicator, dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(70, dtype=dtype))
    optimizer = DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1e-4), Dense(), comm, synchronize="updates", local_steps=2
    )
    for _ in range(100):
        optimizer.zero_grad()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter.dtype == dtype
    torch.testing.assert_close(parameter.detach().float(), torch.full((70,), 0.99), atol=2e-3, rtol=0)


def test_zero_grad_reaches_16_bit_parameters(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), Dense(), comm, synchronize="updates")
    for set_to_none in (False, True):
        parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none)
        assert parameter.grad is None if set_to_none else not parameter.grad.any()


def test_sparse_gradients_are_the_local_optimizers_business(comm: Communicator) -> None:
    embedding = nn.Embedding(7, 3, sparse=True)
    with torch.no_grad():
        embedding.weight.zero_()
    inner = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    optimizer = DistributedOptimizer(inner, Dense(), comm, synchronize="updates")
    embedding(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(embedding.weight.detach()[1:3], torch.full((2, 3), -0.1))


# Closures that are evaluated more than once -------------------------------------------------------------------------


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
    assert same_on_all_ranks(model, comm)


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


@pytest.mark.parametrize("synchronize", ["gradients", "updates"])
def test_an_average_of_the_weights_is_refused_where_the_ranks_would_differ_in_it(
    synchronize: Any, comm: Communicator
) -> None:
    model = make_model()
    asgd = torch.optim.ASGD(model.parameters(), lr=0.01)
    if synchronize == "updates" and comm.size > 1:
        text = f"rank {comm.rank} of {comm.size}: ASGD has a second view of the model, 'ax'"
        with pytest.raises(ValueError, match=text):
            DistributedOptimizer(asgd, Dense(), comm, synchronize=synchronize)
        return
    optimizer = DistributedOptimizer(asgd, Dense(), comm, synchronize=synchronize)
    train(model, optimizer, comm, range(4))
    views = torch.cat([asgd.state[one]["ax"].reshape(-1) for one in model.parameters()])
    assert comm.size == 1 or all(torch.equal(other, views) for other in comm.mpi_comm.allgather(views))


def test_an_average_of_the_weights_on_one_rank_is_refused_on_all(comm: Communicator) -> None:
    model, averages = make_model(), comm.rank == comm.size - 1
    inner = (torch.optim.ASGD if averages else torch.optim.SGD)(model.parameters(), lr=0.01)
    refused = pytest.raises(ValueError if averages else CollectiveMismatch, match="ASGD has a second view of the model")
    with refused if comm.size > 1 else nullcontext():
        DistributedOptimizer(inner, Dense(), comm, synchronize="updates")


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["plain", "overlap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_changed_before_local_steps_stays_and_is_refused_by_the_synchronization(
    dtype: torch.dtype, options: dict[str, Any], comm: Communicator
) -> None:
    model = make_model()
    optimizer = wrap(model, Dense(), comm, synchronize="updates", local_steps=3, **options)
    train(model, optimizer, comm, range(3))
    model.to(dtype)
    train(model, optimizer, comm, range(3, 5))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    with pytest.raises(ValueError, match=rf"'0\.weight' was torch\.float32.* is {dtype}.*; make both optimizers again"):
        train(model, optimizer, comm, range(5, 6))
