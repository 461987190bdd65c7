"""DistributedLion and SignMuon against Lion, Muon and a simulation of all ranks, and their states."""

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
from mpicomp.torch import DistributedLion, SignMuon, redistribute_states
from mpicomp.torch.contrib import sign_muon
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.branches import Branches, add, values, ways
from tests.mpi.torch.branches import train as train_branches
from tests.mpi.torch.one_bit_adam.test_one_bit_adam import random_vector
from tests.mpi.torch.training import N_CLASSES, N_INPUTS, parameters_of, same_on_all_ranks, train

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is PyTorch 2.9's")
pytestmark = few_ranks
merges = pytest.mark.parametrize("merge", ["vote", "mean", "marsit"])
kinds = pytest.mark.parametrize("kind", [DistributedLion, pytest.param(SignMuon, marks=needs_muon)])
SHAPES = ([20, 15], [8, 30])
GROUP = {"lr": 0.01, "weight_decay": 0.1}


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(random_vector(k, n=math.prod(one)).view(one).to(dtype)) for k, one in enumerate(SHAPES)]


def set_gradients(parameters: list[nn.Parameter], *seed: int) -> None:
    for k, one in enumerate(parameters):
        one.grad = random_vector(*seed, k, n=one.numel()).view(one.shape).to(one.dtype)


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Layers without biases: matrices alone."""
    torch.manual_seed(seed)
    layers = nn.Linear(N_INPUTS, 37, bias=False), nn.ReLU(), nn.Linear(37, N_CLASSES, bias=False)
    return nn.Sequential(*layers).to(dtype)


def made(kind: Any, comm: Communicator, model: nn.Module, **options: Any) -> Any:
    return kind(model.named_parameters(), **{"lr": 0.01, "bucket_mb": 0.001, **options}, comm=comm)


def sign(values: Tensor) -> Tensor:
    return torch.where(values >= 0, 1.0, -1.0).to(values.dtype)


def lion_step(x: Tensor, m: Tensor) -> None:
    """Lion, as in the algorithm of its paper."""
    assert x.grad is not None
    x.detach().copy_(x - GROUP["lr"] * (sign(0.9 * m + (1 - 0.9) * x.grad) + GROUP["weight_decay"] * x))
    m.copy_(0.99 * m + (1 - 0.99) * x.grad)


@merges
def test_ranks_merge_the_signs_of_a_simulation(comm: Communicator, merge: Any) -> None:
    n, lr, decay = 600, 0.01, 0.1
    x, m = nn.Parameter(random_vector(1, n=n).double()), np.zeros((comm.size, n))
    optimizer = DistributedLion([x], lr, (0.8, 0.95), decay, merge=merge, comm=comm)
    agreement = []
    for step in range(8):
        gradients = np.array([random_vector(rank, step, n=n).double().numpy() for rank in range(comm.size)])
        gradients[:, :10] = 0  # the sign of 0 is +1
        x.grad, before = torch.from_numpy(gradients[comm.rank]), x.detach().numpy().copy()
        optimizer.step()
        delta = (before * (1 - lr * decay) - x.detach().numpy()) / lr
        mean = np.where(0.8 * m + 0.2 * gradients >= 0, 1, -1).mean(0)
        m = 0.95 * m + 0.05 * gradients
        sure = {"vote": mean != 0, "mean": np.full(n, True), "marsit": np.abs(mean) == 1}[merge]
        np.testing.assert_allclose(delta[sure], (mean if merge == "mean" else np.sign(mean))[sure], atol=1e-9)
        np.testing.assert_allclose(np.abs(delta[~sure]), 1, atol=1e-9)
        agreement.append((delta - mean)[~sure])
    drawn = np.concatenate(agreement)  # nothing on one rank
    assert merge != "marsit" or abs(drawn.sum()) < 0.1 * drawn.size or comm.size == 1
    np.testing.assert_allclose(optimizer.state_dict()["mpicomp"]["own_momenta"]["group 0, parameter 0"], m[comm.rank])


@merges
def test_one_rank_makes_the_steps_of_lion(comm: Communicator, merge: Any) -> None:
    def steps(single: Communicator) -> None:
        ours, theirs = matrices(torch.float64), matrices(torch.float64)
        momenta = [torch.zeros_like(one) for one in theirs]
        optimizer = DistributedLion(ours, **GROUP, merge=merge, comm=single)
        for step in range(10):
            for parameters in (ours, theirs):
                set_gradients(parameters, step)
            optimizer.step()
            for x, m in zip(theirs, momenta, strict=True):
                lion_step(x, m)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)

    run_local(1, steps)


@needs_muon
@pytest.mark.parametrize("orthogonalize", [False, True])
def test_one_rank_makes_steps_by_the_signs_of_muons(comm: Communicator, orthogonalize: bool) -> None:
    def steps(single: Communicator) -> None:
        ours = matrices()
        options: Any = {"momentum": 0.9, "orthogonalize": orthogonalize, "merge": "mean"}
        optimizer = SignMuon(ours, **GROUP, **options, comm=single)
        theirs = matrices()
        muon = torch.optim.Muon(theirs, lr=1, momentum=0.9, nesterov=False, weight_decay=0)
        for step in range(6):
            set_gradients(ours, step)
            for one, other in zip(ours, theirs, strict=True):
                other.detach().zero_()
                other.grad = one.grad + GROUP["weight_decay"] * one.detach()
            muon.step()
            expected = [sign(-other.detach()) for other in theirs]
            if orthogonalize:
                flat = [nn.Parameter(torch.zeros_like(one)) for one in expected]
                for one, signs in zip(flat, expected, strict=True):
                    one.grad = signs
                scale = "match_rms_adamw"
                torch.optim.Muon(flat, lr=1, momentum=0, nesterov=False, weight_decay=0, adjust_lr_fn=scale).step()
                expected = [-one.detach() / (0.2 * math.sqrt(max(one.shape))) for one in flat]
            before = [one.detach().clone() for one in ours]
            optimizer.step()
            for one, x, v in zip(ours, before, expected, strict=True):
                torch.testing.assert_close(one.detach(), x - GROUP["lr"] * v)

    run_local(1, steps)


@kinds
@merges
def test_equal_gradients_make_the_steps_of_one_rank(comm: Communicator, kind: Any, merge: Any) -> None:
    def steps(group: Communicator) -> list[Tensor]:
        parameters = matrices()
        optimizer = kind(parameters, **GROUP, merge=merge, comm=group)
        for step in range(6):
            set_gradients(parameters, step)
            optimizer.step()
        return parameters

    for one, other in zip(steps(comm), run_local(1, steps)[0], strict=True):
        assert torch.equal(one, other)


@kinds
@merges
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_training_has_the_same_bits(comm: Communicator, kind: Any, merge: Any, dtype: torch.dtype) -> None:
    more = {"orthogonalize": True} if kind is SignMuon else {}
    model = model_of(dtype)
    optimizer = made(kind, comm, model, merge=merge, **more)
    train(model, optimizer, comm, range(4))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    again = model_of(dtype, seed=5)
    resumed = made(kind, comm, again, merge=merge, **more)
    again.load_state_dict(parameters)
    resumed.load_state_dict(state)
    for one, its in ((model, optimizer), (again, resumed)):
        train(one, its, comm, range(4, 9))
    assert torch.equal(parameters_of(model), parameters_of(again))
    assert same_on_all_ranks(model, comm)
    assert resumed.steps == 9


@kinds
@merges
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_no_trace(comm: Communicator, kind: Any, merge: Any, value: float) -> None:
    models = model_of(), model_of()
    optimizers = [made(kind, comm, model, merge=merge) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, comm, range(3))
    before, m = parameters_of(models[0]), copy.deepcopy(optimizers[0].state_dict()["mpicomp"]["own_momenta"])
    for parameter in models[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    if comm.rank == comm.size - 1:
        models[0][2].weight.grad[0, 0] = value
    with pytest.raises(NonFiniteGradient):
        optimizers[0].step()
    assert torch.equal(parameters_of(models[0]), before)
    assert optimizers[0].steps == 3
    for name, tensor in optimizers[0].state_dict()["mpicomp"]["own_momenta"].items():
        assert torch.equal(tensor, m[name])
    if merge == "mean":  # the others have drawn coins
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, comm, range(3, 6))
        assert torch.equal(*map(parameters_of, models))


@ways
@merges
def test_parameters_join_and_rest_in_groups(comm: Communicator, how: Any, merge: Any) -> None:
    model = Branches()
    model.new.requires_grad_(how is add)
    groups = [{"params": model.old[0].parameters(), "lr": 0.01}, {"params": model.old[2].parameters(), **GROUP}]
    if how is not add:
        groups.append({"params": model.new.parameters(), "betas": (0.5, 0.9)})
    named = list(model.named_parameters())
    optimizer = DistributedLion(groups, merge=merge, comm=comm, named_parameters=named, bucket_mb=0.001)
    train_branches(model, optimizer, comm, range(3))
    how(model, optimizer)
    before = values(model.new)
    train_branches(model, optimizer, comm, range(3, 6))
    weight = model.new[0].weight
    weight.requires_grad_(False)
    rests, m = weight.detach().clone(), optimizer.state_dict()["mpicomp"]["own_momenta"]["new.0.weight"]
    train_branches(model, optimizer, comm, range(6, 8))
    assert torch.equal(weight, rests)
    assert torch.equal(optimizer.state_dict()["mpicomp"]["own_momenta"]["new.0.weight"], m)
    assert not torch.equal(values(model.new), before)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_branches(model, optimizer, comm, range(8, 9))
    assert same_on_all_ranks(model, comm)


@kinds
def test_other_numbers_of_ranks_start_from_the_mean_momentum(comm: Communicator, kind: Any) -> None:
    model = model_of()
    optimizer = made(kind, comm, model)
    train(model, optimizer, comm, range(3))
    states = comm.allgather_object(optimizer.state_dict())
    (alone,) = redistribute_states(states, 1)
    for name, tensor in alone["mpicomp"]["own_momenta"].items():
        expected = sum(state["mpicomp"]["own_momenta"][name].double() for state in states) / comm.size
        torch.testing.assert_close(tensor.double(), expected)
    parameters = model.state_dict()

    def go_on(single: Communicator) -> int:
        other = model_of()
        other.load_state_dict(parameters)
        resumed = made(kind, single, other)
        resumed.load_state_dict(alone)
        train(other, resumed, single, range(3, 5))
        return resumed.steps

    assert run_local(1, go_on) == [5]


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (DistributedLion, {"merge": "sum"}, r"merge is 'sum'; choose one of 'vote', 'mean', 'marsit'"),
        (DistributedLion, {"betas": (0.9, 1.0)}, "betas is"),
        (DistributedLion, {"betas": (0.9,)}, "betas is"),
        (DistributedLion, {"lr": -1}, "lr is -1"),
        (DistributedLion, {"weight_decay": "much"}, "are not all numbers; write DistributedLion"),
        pytest.param(SignMuon, {"momentum": 1.0}, "momentum is 1.0", marks=needs_muon),
        pytest.param(SignMuon, {"orthogonalize": 1}, "orthogonalize is 1; it must be True or False", marks=needs_muon),
    ],
)
def test_options_out_of_range_are_refused(comm: Communicator, kind: Any, options: Any, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        made(kind, comm, model_of(), **options)


@pytest.mark.mpi(min_size=2)
@kinds
def test_options_that_differ_between_ranks_are_refused(comm: Communicator, kind: Any) -> None:
    with pytest.raises(CollectiveMismatch):
        made(kind, comm, model_of(), merge="mean" if comm.rank else "vote")


@needs_muon
@pytest.mark.parametrize("named", [False, True])
def test_parameters_other_than_matrices_are_named(comm: Communicator, named: bool) -> None:
    model = nn.Linear(4, 3)
    given: dict[str, Any] = {"named_parameters": model.named_parameters()} if named else {}
    with pytest.raises(ValueError, match=r"takes matrices; give bias \[3\] to another optimizer"):
        SignMuon(model.parameters() if named else model.named_parameters(), comm=comm, **given)
    optimizer = SignMuon([model.weight], comm=comm)
    with pytest.raises(ValueError, match=r"takes matrices; give bias \[3\]|give a parameter \[3\]"):
        optimizer.add_param_group({"params": [model.bias]})
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_torch_without_muon_is_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sign_muon, "_newton_schulz", None)
    with pytest.raises(ValueError, match=r"PyTorch 2\.9 or later: update torch"):
        made(SignMuon, comm, model_of())


@kinds
def test_states_of_other_merges_are_refused(comm: Communicator, kind: Any) -> None:
    model = model_of()
    state = made(kind, comm, model).state_dict()
    with pytest.raises((ValueError, CollectiveMismatch), match="use the same options"):
        made(kind, comm, model, merge="marsit").load_state_dict(state)
