"""OneBitLamb against LAMB and a simulation of all ranks, and its states."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.torch import OneBitLamb, redistribute_states
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.branches import Branches, add, values, ways
from tests.mpi.torch.branches import train as train_branches
from tests.mpi.torch.one_bit_adam.test_one_bit_adam import in_groups, model_of, random_vector, set_gradients
from tests.mpi.torch.training import make_model, parameters_of, same_on_all_ranks, train
from tests.reference.one_process.one_bit_lamb import OneBitLambOneProcess

pytestmark = few_ranks

SIGNS = "one-bit:bucket=32768,scale=l1"


def made(comm: Communicator, model: nn.Module, **options: Any) -> OneBitLamb:
    named = list(model.named_parameters())
    options = {"lr": 0.01, "bucket_mb": 0.001, "warmup_steps": 4, **options}
    return OneBitLamb(model.parameters(), comm=comm, named_parameters=named, **options)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("compressor", "warmup_steps"), [(SIGNS, 3), ("top-k:rate=1", 3), (SIGNS, 100)], ids=["signs", "identity", "dense"]
)
def test_every_step_is_that_of_a_simulation_of_all_ranks(
    comm: Communicator, weight_decay: float, compressor: str, warmup_steps: int
) -> None:
    n, group = 700, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": weight_decay}
    start = random_vector(1000, n=n).double()
    parts = [nn.Parameter(part.clone()) for part in start.split([400, 300])]
    options: dict[str, Any] = {"warmup_steps": warmup_steps, "compressor": compressor}
    optimizer = OneBitLamb(parts, **group, **options, comm=comm, bucket_mb=0.001)
    reference = OneBitLambOneProcess([x.numpy() for x in start.split([400, 300])], comm.size, group=group, **options)
    for step in range(12):
        gradients = [random_vector(rank, step, n=n).double() for rank in range(comm.size)]
        for gradient in gradients:
            gradient[10:20] = 0
            gradient[650] = 0 if step < 3 else 5  # v is frozen as 0 there
            gradient[400:] *= 10
        set_gradients(parts, gradients[comm.rank])
        optimizer.step()
        reference.step([[part.numpy() for part in gradient.split([400, 300])] for gradient in gradients])
        for part, x in zip(parts, reference.x, strict=True):
            np.testing.assert_allclose(part.detach().numpy(), x, rtol=1e-8, atol=1e-9)
    assert optimizer.frozen == (warmup_steps == 3)


def test_elements_whose_momentum_stays_zero_do_not_decide_the_factor(comm: Communicator) -> None:
    x = nn.Parameter(random_vector(1, n=300))
    optimizer = OneBitLamb([x], warmup_steps=2, comm=comm)
    for step in range(8):
        gradient = 10.0**step * random_vector(comm.rank, step, n=300)  # so that v grows, and the factor falls
        gradient[50:90] = 0
        x.grad = gradient
        optimizer.step()
    (moments,) = optimizer._synchronizer.moments
    assert optimizer.masked == 40
    assert moments.named()["factor"]["group 0, parameter 0"] == pytest.approx(0.9**6)


def test_a_tensor_of_zeros_is_moved_with_a_ratio_of_one(comm: Communicator) -> None:
    x = nn.Parameter(torch.zeros(50))
    optimizer = OneBitLamb([x], lr=0.01, warmup_steps=9, comm=comm)
    x.grad = torch.ones(50)
    optimizer.step()
    torch.testing.assert_close(x.detach(), torch.full((50,), -0.01 * 0.1 / 0.001**0.5))


def test_ranks_stay_equal_with_groups_and_missing_gradients(comm: Communicator) -> None:
    models = [model_of(), model_of()]
    optimizers = [OneBitLamb(in_groups(one), warmup_steps=3, comm=comm, seed=seed) for seed, one in enumerate(models)]
    for step in range(8):
        for parameters in models:
            set_gradients(parameters, random_vector(comm.rank, step))
        if comm.rank == 0 and step:
            models[0][2].grad = None
            models[1][2].grad = torch.zeros_like(models[1][2])
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))
    assert same_on_all_ranks(nn.ParameterList(models[0]), comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [2, 4, 9])
def test_resumed_training_has_the_same_bits(comm: Communicator, steps: int, dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(steps))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = make_model(seed=5, dtype=dtype)
    resumed = made(comm, again)
    again.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for one, its in ((model, optimizer), (again, resumed)):
        train(one, its, comm, range(steps, steps + 10))
    assert torch.equal(parameters_of(model), parameters_of(again))
    assert same_on_all_ranks(model, comm)


def test_states_go_to_other_numbers_of_ranks(comm: Communicator) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(7))
    (alone,) = redistribute_states(comm.allgather_object(optimizer.state_dict()), 1)
    parameters = model.state_dict()

    def go_on(single: Communicator) -> int:
        other = make_model()
        other.load_state_dict(parameters)
        resumed = made(single, other)
        resumed.load_state_dict(alone)
        train(other, resumed, single, range(7, 9))
        return resumed.steps

    assert run_local(1, go_on) == [9]


@pytest.mark.parametrize("steps", [2, 6], ids=["warm-up", "frozen"])
def test_a_gradient_that_is_not_finite_leaves_no_trace(comm: Communicator, steps: int) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(steps))
    before = parameters_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan if comm.rank == 0 else 1)
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert torch.equal(parameters_of(model), before)
    assert optimizer.steps == steps


@ways
def test_parameters_join(comm: Communicator, how: Any) -> None:
    model = Branches(torch.float32)
    model.new.requires_grad_(how is add)
    optimizer = OneBitLamb(
        (model.old if how is add else model).parameters(), warmup_steps=3, comm=comm,
        named_parameters=list(model.named_parameters()), bucket_mb=0.001,
    )  # fmt: skip
    train_branches(model, optimizer, comm, range(5))
    how(model, optimizer)
    before = values(model.new)
    train_branches(model, optimizer, comm, range(5, 12))
    model.new[0].weight.requires_grad_(False)
    rests = model.new[0].weight.detach().clone()
    train_branches(model, optimizer, comm, range(12, 14))
    assert torch.equal(model.new[0].weight, rests)
    assert not torch.equal(values(model.new), before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert same_on_all_ranks(model, comm)
    assert optimizer.frozen


@pytest.mark.parametrize(
    "options",
    [{"coeff_beta": 1.0}, {"min_coeff": 11}, {"factor_min": 5.0}, {"factor_threshold": -1}, {"max_coeff": "x"}],
)
def test_options_out_of_range_are_refused(comm: Communicator, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        made(comm, make_model(), **options)
