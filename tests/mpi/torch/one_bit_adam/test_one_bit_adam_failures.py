"""OneBitAdam: refused options, the state after a step that fails, and saved states."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense
from mpicomp.torch import (
    DistributedLion,
    DistributedOptimizer,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
    broadcast_optimizer_state,
)
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.state.test_rank_state import through_torch_load
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train

pytestmark = up_to_two_ranks

OPTIONS: dict[str, Any] = {"lr": 0.01, "warmup_steps": 4, "bucket_mb": 0.001}


def made(comm: Communicator, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, OneBitAdam]:
    """A model and its optimizer, over several buckets."""
    model = make_model() if model is None else model
    named = list(model.named_parameters())
    optimizer = OneBitAdam(model.parameters(), **(OPTIONS | options), comm=comm, named_parameters=named)
    assert len(optimizer.aggregators) > 1
    return model, optimizer


def tensors_of(state: Any) -> list[Any]:
    """The leaves of a state; tensors as lists."""
    if isinstance(state, dict):
        return [leaf for key in sorted(state, key=str) for leaf in (key, *tensors_of(state[key]))]
    if isinstance(state, list | tuple):
        return [leaf for one in state for leaf in tensors_of(one)]
    return [state.tolist()] if isinstance(state, Tensor) else [state]


def spoilt_step(model: nn.Module, optimizer: OneBitAdam, comm: Communicator, value: float) -> None:
    """A step for which the last rank's last gradient, which lies in the last bucket, has such a value."""
    inputs, labels = batch(comm.rank, next(model.parameters()).dtype)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == comm.size - 1:
        [*model.parameters()][-1].grad[-1] = value
    optimizer.step()


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("steps", [2, 6], ids=["warm-up", "frozen"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(comm: Communicator, steps: int, value: float, bits: int) -> None:
    model, optimizer = made(comm, bits=bits)
    alone, undisturbed = made(comm, bits=bits, seed=0)
    train(model, optimizer, comm, range(steps))
    train(alone, undisturbed, comm, range(steps))
    before, parameters = tensors_of(copy.deepcopy(optimizer.state_dict())), parameters_of(model)
    with pytest.raises(NonFiniteGradient) as caught:
        spoilt_step(model, optimizer, comm, value)
    assert caught.value.ranks == (comm.size - 1,)
    assert ("'2.bias'" in str(caught.value)) == (comm.rank == comm.size - 1)
    assert tensors_of(optimizer.state_dict()) == before
    assert torch.equal(parameters_of(model), parameters)
    for one, its in ((model, optimizer), (alone, undisturbed)):
        train(one, its, comm, range(steps, steps + 6))
    assert torch.equal(parameters_of(model), parameters_of(alone))
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_in_a_later_bucket_leaves_no_trace(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made(comm)
    train(model, optimizer, comm, range(6))
    before, parameters = tensors_of(copy.deepcopy(optimizer.state_dict())), parameters_of(model)
    if comm.rank == 1:
        last = optimizer.reducers[-1].aggregator
        monkeypatch.setattr(last, "aggregate", lambda *_, **__: comm.barrier())
    with pytest.raises(CollectiveMismatch):
        train(model, optimizer, comm, range(6, 7))
    monkeypatch.undo()
    assert tensors_of(optimizer.state_dict()) == before
    assert torch.equal(parameters_of(model), parameters)


@pytest.mark.parametrize("kind", [OneBitAdam, OneBitLamb, ZeroOneAdam])
def test_a_state_from_before_the_freeze_takes_an_optimizer_back_to_the_bit(comm: Communicator, kind: Any) -> None:
    models = [make_model(), make_model()]
    back, fresh = (kind(model.parameters(), lr=0.01, warmup_steps=4, comm=comm) for model in models)
    train(models[0], back, comm, range(2))
    parameters, state = copy.deepcopy(models[0].state_dict()), back.state_dict()
    train(models[0], back, comm, range(2, 9))
    for model, optimizer in zip(models, (back, fresh), strict=True):
        model.load_state_dict(parameters)
        optimizer.load_state_dict(state)
        train(model, optimizer, comm, range(2, 9))
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.parametrize("kept", [copy.deepcopy, through_torch_load])
@pytest.mark.parametrize(
    ("options", "dtype", "steps"),
    [
        ({}, torch.float32, 2),
        ({}, torch.float32, 4),
        ({"bits": 4}, torch.float32, 9),
        ({"preconditioned": False}, torch.bfloat16, 9),
        ({"warmup_steps": "auto", "betas": (0.9, 0.9)}, torch.float32, 9),
        ({"warmup_steps": "auto", "betas": (0.9, 0.9)}, torch.bfloat16, 30),
    ],
)
def test_resumed_training_has_the_same_bits(
    comm: Communicator, options: dict[str, Any], dtype: torch.dtype, steps: int, kept: Any
) -> None:
    model, optimizer = made(comm, make_model(dtype=dtype), **options)
    train(model, optimizer, comm, range(steps))
    parameters, state = copy.deepcopy(model.state_dict()), kept(optimizer.state_dict())
    train(model, optimizer, comm, range(steps, steps + 15))
    resumed, again = made(comm, make_model(seed=5, dtype=dtype), **options)
    resumed.load_state_dict(parameters)
    again.load_state_dict(state)
    assert again.masked == 0
    train(resumed, again, comm, range(steps, steps + 15))
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    assert again.frozen == optimizer.frozen
    assert tensors_of(again.state_dict()) == tensors_of(optimizer.state_dict())


def test_masked_elements_stay_masked_after_resuming(comm: Communicator) -> None:
    def trained(optimizer: OneBitAdam, parameter: nn.Parameter) -> None:
        parameter.grad = torch.ones(200) * (comm.rank + 1)
        optimizer.step()

    def make() -> tuple[OneBitAdam, nn.Parameter]:
        parameter = nn.Parameter(torch.zeros(200))
        return OneBitAdam([parameter], warmup_steps=1, comm=comm), parameter

    optimizer, parameter = make()
    parameter.grad = torch.arange(200.0) - 150
    optimizer.step()
    trained(optimizer, parameter)
    state, before = copy.deepcopy(optimizer.state_dict()), parameter.detach().clone()
    again, resumed = make()
    with torch.no_grad():
        resumed.copy_(before)
    again.load_state_dict(state)
    trained(again, resumed)
    assert again.masked == 1
    assert resumed[150] == before[150]
    assert (resumed[:150] != before[:150]).all()


KEPT = "aggregators"
DAMAGES: dict[str, tuple[Any, str]] = {
    "another rank's": (lambda own: own | {"rank": own["rank"] + 1}, "loads its own"),
    "of more ranks": (lambda own: own | {"ranks": own["ranks"] + 1}, "redistribute_states"),
    "other options": (lambda own: own | {"options": own["options"].replace("steps=4", "steps=5")}, "same options"),
    "other lengths": (lambda own: own | {"m": {name: one[:-1] for name, one in own["m"].items()}}, "same options"),
    "other types": (lambda own: own | {"v": {name: one.to_sparse() for name, one in own["v"].items()}}, "not tensors"),
    "fewer buckets": (lambda own: own | {"aggregators": own["aggregators"][1:]}, "buckets"),
    "another stage's": (lambda own: own | {"frozen": False}, "not one of Dense"),
    "no rule": (lambda own: own | {"freeze_rule": {}}, "damaged"),
    "a rule of texts": (lambda own: own | {"freeze_rule": {"norms": "", "rates": []}}, "damaged"),
    "no steps": (lambda own: {key: own[key] for key in own if key != "steps"}, "damaged"),
    "a residual of NaN": (
        lambda own: own | {KEPT: [one | {"worker_error": one["worker_error"] * math.nan} for one in own[KEPT]]},
        "worker_error holds NaN",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_changes_nothing_on_any_rank(comm: Communicator, damage: str) -> None:
    change, message = DAMAGES[damage]
    model, optimizer = made(comm)
    train(model, optimizer, comm, range(6))
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.5
    if comm.rank == comm.size - 1:
        state["mpicomp"] = change(state["mpicomp"])
    train(model, optimizer, comm, range(6, 8))
    before = tensors_of(copy.deepcopy(optimizer.state_dict()))
    if comm.rank == comm.size - 1:
        with pytest.raises(ValueError, match=message):
            optimizer.check_state_dict(state)
    expected = ValueError if comm.rank == comm.size - 1 else CollectiveMismatch
    with pytest.raises(expected, match=rf"rank {comm.size - 1} of {comm.size}.*{message}"):
        optimizer.load_state_dict(state)
    assert tensors_of(optimizer.state_dict()) == before
    train(model, optimizer, comm, range(8, 10))


@pytest.mark.parametrize(
    "change", [lambda _: None, lambda s: s | {"param_groups": 5}, lambda s: s | {"param_groups": [{"params": [0]}]},
               lambda s: {key: s[key] for key in s if key != "mpicomp"}]
)  # fmt: skip
def test_a_state_of_something_else_is_refused(comm: Communicator, change: Any) -> None:
    model, optimizer = made(comm)
    state = change(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match=r"not one of OneBitAdam|cannot load its part"):
        optimizer.load_state_dict(state)
    train(model, optimizer, comm, range(2))


def test_a_state_of_another_class_is_not_only_called_damaged(comm: Communicator) -> None:
    model, optimizer = made(comm)
    dense = DistributedOptimizer(torch.optim.Adam(model.parameters()), Dense(), comm)
    lion = DistributedLion(model.parameters(), comm=comm)
    for one, other in (optimizer, lion), (lion, optimizer), (optimizer, dense), (dense, optimizer):
        with pytest.raises(ValueError, match=r"damaged, or of another class of optimizer or hook \(it has no '"):
            one.load_state_dict(other.state_dict())


@pytest.mark.mpi(min_size=2)
def test_states_of_different_steps_are_a_mismatch(comm: Communicator) -> None:
    model, optimizer = made(comm)
    states = []
    for step in range(6):
        train(model, optimizer, comm, range(step, step + 1))
        states.append(copy.deepcopy(optimizer.state_dict()))
    before = tensors_of(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(CollectiveMismatch, match=r"after 6 steps, with v frozen"):
        optimizer.load_state_dict(states[2 if comm.rank else 5])
    assert tensors_of(optimizer.state_dict()) == before


def test_it_is_not_wrapped(comm: Communicator) -> None:
    model, optimizer = made(comm)
    with pytest.raises(TypeError, match="OneBitAdam synchronizes the ranks itself"):
        DistributedOptimizer(optimizer, Dense(), comm)
    train(model, optimizer, comm, range(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 0}, "bits is 0"),
        ({"bits": 9}, "bits is 9"),
        ({"bits": 1.5}, "bits is 1.5"),
        ({"warmup_steps": 0}, "warmup_steps is 0"),
        ({"bucket_mb": 0}, "bucket_mb is 0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"eps": 0}, "eps is 0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"compressor": "two-bit"}, "two-bit"),
    ],
)
def test_options_out_of_range_are_told_on_every_rank(comm: Communicator, options: dict[str, Any], message: str) -> None:
    bad = comm.rank == comm.size - 1
    expected = ValueError if bad else CollectiveMismatch
    with pytest.raises(expected, match=rf"rank {comm.size - 1} of {comm.size}.*{message}"):
        made(comm, **(options if bad else {}))
    comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{"bits": 2}, {"warmup_steps": 9}, {"preconditioned": False}, {"bucket_mb": 7}])
def test_options_that_differ_are_a_mismatch(comm: Communicator, options: dict[str, Any]) -> None:
    with pytest.raises(CollectiveMismatch, match="OneBitAdam"):
        made(comm, **(options if comm.rank else {}))


@pytest.mark.mpi(min_size=2)
def test_learning_rates_that_differ_are_a_mismatch_before_anything_moves(comm: Communicator) -> None:
    model, optimizer = made(comm)
    train(model, optimizer, comm, range(2))
    before = parameters_of(model)
    optimizer.param_groups[0]["lr"] = 0.1 if comm.rank else 0.2
    with pytest.raises(CollectiveMismatch, match="lr"):
        train(model, optimizer, comm, range(2, 3))
    assert torch.equal(parameters_of(model), before)


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_a_mismatch(comm: Communicator) -> None:
    model, optimizer = made(comm, make_model(seed=comm.rank))
    with pytest.raises(CollectiveMismatch, match="broadcast_parameters"):
        train(model, optimizer, comm, range(1))


def test_a_sparse_gradient_is_refused_by_name_and_no_rank_waits(comm: Communicator) -> None:
    model = nn.Sequential(nn.Embedding(70, 30, sparse=comm.rank == 0), nn.Linear(30, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = OneBitAdam(model.parameters(), comm=comm, named_parameters=model.named_parameters())
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((ValueError, CollectiveMismatch), match=r"rank 0.*'0\.weight' is sparse"):
        optimizer.step()


def test_one_ranks_state_is_not_for_all(comm: Communicator) -> None:
    _, optimizer = made(comm)
    with pytest.raises(TypeError, match="every rank of OneBitAdam has residuals of its own"):
        broadcast_optimizer_state(optimizer, comm)


def test_a_grad_scaler_is_refused(comm: Communicator) -> None:
    model, optimizer = made(comm)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 10)).sum()).backward()
    with pytest.raises(RuntimeError, match="OneBitAdam takes no GradScaler"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("steps", [2, 4], ids=["warm-up", "frozen"])
@pytest.mark.parametrize(
    "make",
    [
        partial(OneBitAdam, warmup_steps=3),
        partial(OneBitAdam, warmup_steps=3, preconditioned=False),
        partial(OneBitLamb, warmup_steps=3, weight_decay=0.1),
        partial(ZeroOneAdam, warmup_steps=3, variance_doubling=1, most_local_steps=1),
        partial(ZeroOneAdam, warmup_steps=3, variance_doubling=1, most_local_steps=1, preconditioned=True),
    ],
    ids=["1-bit Adam", "1-bit Adam of gradients", "1-bit LAMB", "0/1 Adam", "0/1 Adam of steps"],
)
def test_a_first_gradient_of_a_masked_element_that_is_not_finite_is_refused(
    make: Any, steps: int, value: float, comm: Communicator
) -> None:
    """The element has had no gradient, and is left out: in silence it would hide that a rank has lost its numbers."""
    parameter = nn.Parameter(torch.ones(6))
    optimizer = make([parameter], lr=0.01, comm=comm)
    for step in range(steps):
        parameter.grad = torch.arange(6.0) * (1 + step + comm.rank)
        optimizer.step()
    before = parameter.detach().clone()
    parameter.grad = torch.arange(6.0)
    if comm.rank == comm.size - 1:
        parameter.grad[0] = value
    with pytest.raises(NonFiniteGradient):
        optimizer.step()
    assert torch.equal(parameter, before)
