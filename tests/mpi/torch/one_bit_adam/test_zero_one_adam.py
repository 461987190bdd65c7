"""ZeroOneAdam against plain Adam and a simulation of all ranks, its states, and its failures."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from collectives.threads.run_local import run_local
from mpicomp.aggregator.base import Aggregator
from mpicomp.feedback.base import BY_ELEMENT
from mpicomp.torch import OneBitAdam, ZeroOneAdam, redistribute_states
from mpicomp.torch.one_bit_adam.zero_one_moments import Intervals
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.branches import Branches, add, values, ways
from tests.mpi.torch.branches import train as train_branches
from tests.mpi.torch.one_bit_adam.test_one_bit_adam import OPTIONS, in_groups, model_of, random_vector, set_gradients
from tests.mpi.torch.training import make_model, parameters_of, same_on_all_ranks, train
from tests.reference.one_process.zero_one_adam import ZeroOneAdamOneProcess

pytestmark = few_ranks

IDENTITY = "top-k:rate=1"
SHORT: dict[str, Any] = {"warmup_steps": 5, "variance_doubling": 2, "local_doubling": 3, "most_local_steps": 4}
"""Variance in steps 1, 2 and 4; synchronizations in steps 6, 7, 8, 9, 11, 13, 17, 21, and every fourth one."""
END = 18


def made(comm: Communicator, model: nn.Module, **options: Any) -> ZeroOneAdam:
    named = list(model.named_parameters())
    options = {"lr": 0.001, "bucket_mb": 0.001, **SHORT, **options}
    optimizer = ZeroOneAdam(model.parameters(), comm=comm, named_parameters=named, **options)
    assert len(optimizer.reducers) > 1
    return optimizer


@pytest.mark.parametrize("decoupled", [False, True])
def test_while_v_is_in_motion_and_exact_it_is_adam_without_bias_correction(comm: Communicator, decoupled: bool) -> None:
    x, start = nn.Parameter(random_vector(1000).double()), random_vector(1000).double()
    optimizer = ZeroOneAdam([x], **OPTIONS[0], decoupled_weight_decay=decoupled, variance_doubling=100, comm=comm)
    m, v, decay = torch.zeros_like(start), torch.zeros_like(start), OPTIONS[0]["weight_decay"]
    for step in range(12):
        gradients = [random_vector(rank, step).double() for rank in range(comm.size)]
        x.grad = gradients[comm.rank].clone()
        optimizer.step()
        g = sum(gradients, torch.zeros_like(start)) / comm.size + (0 if decoupled else decay * start)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        start = start - 0.01 * (m / (v.sqrt() + 1e-8) + (decay * start if decoupled else 0))
        torch.testing.assert_close(x.detach(), start, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("compressor", ["one-bit:bucket=32768,scale=l1", IDENTITY])
def test_every_step_is_that_of_a_simulation_of_all_ranks(
    comm: Communicator, preconditioned: bool, compressor: str
) -> None:
    n, group = 700, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
    start = random_vector(1000, n=n).double()
    parts = [nn.Parameter(part.clone()) for part in start.split([400, 300])]
    options = {**SHORT, "preconditioned": preconditioned}
    optimizer = ZeroOneAdam(parts, **group, **options, compressor=compressor, comm=comm, bucket_mb=0.001)
    references = [
        ZeroOneAdamOneProcess(x.numpy(), comm.size, compressor, k, group=group, **options)
        for k, x in enumerate(start.split([400, 300]))
    ]
    for step in range(END):
        gradients = [random_vector(rank, step, n=n).double() for rank in range(comm.size)]
        for gradient in gradients:
            gradient[10:20] = 0
            gradient[650] = 0 if step < 4 else 5  # v is frozen as 0 there
        set_gradients(parts, gradients[comm.rank])
        optimizer.step()
        for k, reference in enumerate(references):
            reference.step([gradient.split([400, 300])[k].numpy() for gradient in gradients])
            np.testing.assert_allclose(parts[k].detach().numpy(), reference.x[comm.rank], rtol=1e-9, atol=1e-10)
    assert optimizer.frozen
    assert optimizer.masked == 11
    assert optimizer.models_differ


def test_one_rank_without_compression_is_adam_with_a_frozen_v() -> None:
    options = {**SHORT, "variance_doubling": 100, "most_local_steps": 1, "compressor": IDENTITY}

    def moved(comm: Communicator) -> Tensor:
        x = nn.Parameter(random_vector(3, n=200).double())
        optimizer = ZeroOneAdam([x], lr=0.01, comm=comm, **options)
        for step in range(END):
            x.grad = random_vector(step, n=200).double()
            optimizer.step()
        return x.detach()

    x = random_vector(3, n=200).double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(END):
        g = random_vector(step, n=200).double()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2 if step < 5 else v
        x = x - 0.01 * m / (v.sqrt() + 1e-8)
    torch.testing.assert_close(run_local(1, moved)[0], x, rtol=1e-6, atol=1e-6)


def test_intervals_double_after_as_many_steps_as_asked_for() -> None:
    intervals = Intervals(5, 2, 3, 4)
    assert [step for step in range(1, 30) if intervals.updates_variance(step)] == [1, 2, 4, 6, 8, 12, 16, 24]
    assert [step for step in range(1, 20) if intervals.synchronizes(step)] == [1, 2, 3, 4, 6, 8, 12, 16]


def test_replicas_are_equal_after_every_synchronization_and_apart_between(comm: Communicator) -> None:
    model = make_model()
    optimizer = made(comm, model)
    differing = []
    for step in range(END):
        train(model, optimizer, comm, range(step, step + 1))
        differing.append(optimizer.models_differ)
        assert same_on_all_ranks(model, comm) == (comm.size == 1 or not optimizer.models_differ)
    assert [step + 1 for step in range(END) if differing[step]] == [10, 12, 14, 15, 16, 18]
    assert optimizer.synchronizations == END - 6
    optimizer.synchronize()
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)
    assert not optimizer.models_differ
    assert optimizer.synchronizations == END - 5


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("rate", [0.0, 1e-40, 1e-6])
def test_a_group_moves_by_its_own_rate_next_to_one_of_a_higher_rate(
    comm: Communicator, rate: float, preconditioned: bool
) -> None:
    def moved(lr: float) -> float:
        """Train two layers, one with this rate, and return the longest move of its elements once v is frozen."""
        model, options = make_model(), {**SHORT, "warmup_steps": 30, "variance_doubling": 100}
        groups = [{"params": model[0].parameters(), "lr": lr}, {"params": model[2].parameters(), "lr": 0.001}]
        optimizer = ZeroOneAdam(groups, **options, preconditioned=preconditioned, comm=comm)
        train(model, optimizer, comm, range(30))
        before = parameters_of(model[0])
        train(model, optimizer, comm, range(30, 60))
        optimizer.synchronize()
        assert same_on_all_ranks(model, comm)
        return float((parameters_of(model[0]) - before).abs().max())

    assert moved(rate) <= 3 * rate / 0.001 * moved(0.001)


def is_pending(aggregator: Aggregator) -> bool:
    """Return True if errors of values that were sent are pending."""
    state, kinds = aggregator.state_dict(), aggregator.state_kinds
    return any(np.any(state[key]) for key, kind in kinds.items() if kind in BY_ELEMENT)


def test_residuals_are_cleared_at_the_switch(comm: Communicator) -> None:
    model = make_model()
    optimizer = made(comm, model, variance_doubling=1)  # one bit in steps 3 and 5
    train(model, optimizer, comm, range(4))
    assert any(map(is_pending, optimizer._synchronizer.saved_aggregators))
    train(model, optimizer, comm, range(4, 5))
    assert optimizer.frozen
    assert not any(map(is_pending, optimizer._synchronizer.saved_aggregators))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [3, 5, 9, 15, 17], ids=lambda steps: f"after-{steps}")
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
        its.synchronize()
    assert torch.equal(parameters_of(model), parameters_of(again))
    assert resumed.synchronizations == optimizer.synchronizations


@pytest.mark.parametrize("steps", [4, 13])
def test_states_go_to_other_ranks_after_a_synchronization_only(comm: Communicator, steps: int) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(steps))
    states, parameters = comm.allgather_object(optimizer.state_dict()), model.state_dict()
    (alone,) = redistribute_states(states, 1)

    def go_on(single: Communicator) -> bool:
        other = make_model()
        other.load_state_dict(parameters)
        resumed = made(single, other)
        resumed.load_state_dict(alone)
        train(other, resumed, single, range(steps, END))
        return bool(torch.isfinite(parameters_of(other)).all())

    assert run_local(1, go_on) == [True]
    if steps == 13:
        train(model, optimizer, comm, range(13, 15))
        with pytest.raises(ValueError, match="in the middle of local steps"):
            redistribute_states(comm.allgather_object(optimizer.state_dict()), comm.size + 1)


@pytest.mark.parametrize("step", [3, 8, 13, 14, 16], ids=["moving", "frozen", "local", "local-2", "synchronizing"])
def test_a_gradient_that_is_not_finite_stops_all_ranks_at_the_next_synchronization(
    comm: Communicator, step: int
) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(step))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    if comm.rank == comm.size - 1:
        model[0].weight.grad[0, 0] = math.inf
    if optimizer._synchronizer.can_refuse:
        with pytest.raises(NonFiniteGradient) as caught:
            optimizer.step()
    else:
        optimizer.step()
        again = make_model()
        resumed = made(comm, again)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(optimizer.state_dict())
        with pytest.raises(NonFiniteGradient):
            resumed.synchronize()
        before = parameters_of(model)
        with pytest.raises(NonFiniteGradient) as caught:
            optimizer.synchronize()
        assert torch.equal(parameters_of(model), before)
    assert caught.value.ranks == (comm.size - 1,)
    assert ("'0.weight'" in str(caught.value)) == (comm.rank == comm.size - 1)
    train(model, optimizer, comm, range(step + 1, step + 6))
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)
    assert torch.isfinite(parameters_of(model)).all()


@pytest.mark.mpi(min_size=2)
def test_learning_rates_that_differ_in_local_steps_are_found_at_the_synchronization(comm: Communicator) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(13))
    rate, optimizer.param_groups[0]["lr"] = 0.001, 0.001 * (1 + comm.rank)
    train(model, optimizer, comm, range(13, 14))
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(CollectiveMismatch, match=r"'rate_sum' of parameter group 0 is 0.001 on rank 0"):
        optimizer.synchronize()


@pytest.mark.mpi(min_size=2)
def test_a_step_and_a_synchronization_without_one_are_not_the_same_call(comm: Communicator) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(16))
    call = optimizer.synchronize if comm.rank else lambda: train(model, optimizer, comm, range(16, 17))
    with pytest.raises(CollectiveMismatch, match=r"'rate_sum' of .* on rank 0, 0.003 on ranks? 1.*in the same order"):
        call()
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)
    assert optimizer.steps == 16
    train(model, optimizer, comm, range(16, END))


def test_a_missing_gradient_counts_as_zeros_in_every_kind_of_step(comm: Communicator) -> None:
    models = [model_of(), model_of()]
    optimizers = [ZeroOneAdam(in_groups(one), **SHORT, comm=comm, seed=seed) for seed, one in enumerate(models)]
    for step in range(END):
        for parameters in models:
            set_gradients(parameters, random_vector(comm.rank, step))
        if comm.rank == 0 and step:
            models[0][2].grad = None
            models[1][2].grad = torch.zeros_like(models[1][2])
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))


@ways
@pytest.mark.parametrize("at", [3, 8, 14], ids=["moving", "frozen", "local"])
def test_parameters_join_at_the_next_synchronization(comm: Communicator, how: Any, at: int) -> None:
    model = Branches(torch.float32)
    model.new.requires_grad_(how is add)
    named = list(model.named_parameters())
    optimizer = ZeroOneAdam(
        (model.old if how is add else model).parameters(), lr=0.001, **SHORT, comm=comm, named_parameters=named,
        bucket_mb=0.001,
    )  # fmt: skip
    train_branches(model, optimizer, comm, range(at))
    how(model, optimizer)
    before = values(model.new)
    train_branches(model, optimizer, comm, range(at, at + 4))
    assert not torch.equal(values(model.new), before)
    train_branches(model, optimizer, comm, range(at + 4, at + 12))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    train_branches(model, optimizer, comm, range(at + 12, at + 20))
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)
    assert optimizer.frozen


@pytest.mark.parametrize("at", [8, 14], ids=["frozen", "local"])
def test_a_frozen_parameter_rests_at_the_common_model(comm: Communicator, at: int) -> None:
    model = make_model()
    optimizer = made(comm, model)
    train(model, optimizer, comm, range(8))
    common = model[0].weight.detach().clone()
    train(model, optimizer, comm, range(8, at))
    if at == 14:
        common = optimizer._synchronizer.agreement.common[model[0].weight].clone()
    model[0].weight.requires_grad_(False)
    train(model, optimizer, comm, range(at, 17))
    assert torch.equal(model[0].weight, common)
    model[0].weight.requires_grad_(True)
    train(model, optimizer, comm, range(17, 21))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"warmup_steps": "auto"}, "warmup_steps is 'auto'; choose a whole number"),
        ({"variance_doubling": 0}, "variance_doubling is 0"),
        ({"local_doubling": 1.5}, "local_doubling is 1.5"),
        ({"most_local_steps": -1}, "most_local_steps is -1"),
        ({"bits": 9}, "bits is 9"),
    ],
)
def test_options_out_of_range_are_refused(comm: Communicator, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        made(comm, make_model(), **options)


def test_a_state_of_another_optimizer_is_refused(comm: Communicator) -> None:
    model = make_model()
    other = OneBitAdam(model.parameters(), comm=comm, bucket_mb=0.001)
    with pytest.raises(ValueError, match="the state"):
        made(comm, make_model()).load_state_dict(other.state_dict())
