"""The outer optimizer of local steps: equations, options, states, schedules."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense, DoubleSqueeze, Marsit, SparseLoCo, run_local
from mpicomp.torch import DistributedOptimizer, redistribute_states
from tests.mpi.lanes import few_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = few_ranks

DENSE = Dense()
CARRIERS: dict[str, Any] = {
    "dense": DENSE,
    "marsit": Marsit(),
    "marsit, auto": Marsit(10, winners=2),
    "sparse_loco": SparseLoCo(16, 64),
    "double_squeeze": DoubleSqueeze(),
}
HEAVY_BALL = partial(torch.optim.SGD, lr=0.7, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


def updates(model: nn.Module, comm: Communicator, algorithm: Any = DENSE, **options: Any) -> DistributedOptimizer:
    """Wrap momentum SGD with local steps in buckets of 1 kB."""
    return wrap(model, algorithm, comm, synchronize="updates", **options)


def mean_gradient_steps(optimizer: torch.optim.Optimizer, model: nn.Module, comm: Communicator, n_steps: int) -> None:
    """Step with the mean of the ranks' gradients, each computed here."""
    for step in range(n_steps):
        optimizer.zero_grad()
        for rank in range(comm.size):
            inputs, labels = batch(1000 * rank + step)
            (nn.functional.cross_entropy(model(inputs), labels) / comm.size).backward()
        optimizer.step()


def own_rule(updates_of_steps: list[Tensor], eta: float, mu: float, start: Tensor) -> Tensor:
    """Return x after the rule of DiLoCo on given aggregated updates."""
    x, b = start.clone(), torch.zeros_like(start)
    for d in updates_of_steps:
        b = mu * b + d
        x = x - eta * (d + mu * b)
    return x


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("outer", [(1, 0), (1.0, 0.0), partial(torch.optim.SGD, lr=1.0)], ids=["int", "float", "sgd"])
def test_a_step_of_1_without_momentum_changes_no_bit(
    outer: Any, algorithm: Any, local_steps: int, comm: Communicator
) -> None:
    plain, moved = make_model(), make_model()
    train(plain, updates(plain, comm, algorithm, local_steps=local_steps), comm, range(12))
    optimizer = updates(moved, comm, algorithm, local_steps=local_steps, outer=outer)
    train(moved, optimizer, comm, range(12))
    assert torch.equal(parameters_of(plain), parameters_of(moved))


def test_dense_updates_of_sgd_without_an_outer_rule_are_the_plain_loop(comm: Communicator) -> None:
    model, plain = make_model(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(sgd, Dense(), comm, synchronize="updates", outer=(1, 0))
    train(model, optimizer, comm, range(6))
    mean_gradient_steps(torch.optim.SGD(plain.parameters(), lr=0.05), plain, comm, 6)
    torch.testing.assert_close(parameters_of(model), parameters_of(plain))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.6)])
def test_dense_updates_of_sgd_are_nesterov_momentum_on_the_mean_gradient(
    eta: float, mu: float, overlap: bool, comm: Communicator
) -> None:
    model, plain = make_model(), make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(
        sgd, Dense(), comm, model.named_parameters(), "updates", bucket_mb=0.001, overlap=overlap, outer=(eta, mu)
    )
    assert len(optimizer.buckets) == 0
    train(model, optimizer, comm, range(8))
    assert len(optimizer.buckets) > 1
    nesterov = torch.optim.SGD(plain.parameters(), lr=0.05 * eta, momentum=mu, nesterov=mu > 0)
    mean_gradient_steps(nesterov, plain, comm, 8)
    torch.testing.assert_close(parameters_of(model), parameters_of(plain))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_the_rule_moves_the_model_by_what_the_algorithm_returns(algorithm: Any, comm: Communicator) -> None:
    """The aggregated updates of a run with (0.7, 0.9), seen by a hook, give the same model by the rule's own lines."""
    model = make_model()
    start, seen = parameters_of(model), []
    optimizer = updates(model, comm, algorithm, local_steps=2, outer=(0.7, 0.9))
    gradients: dict[Tensor, Tensor] = {}

    def keep(sgd: torch.optim.Optimizer, *_: object) -> None:
        held = [parameter for group in sgd.param_groups for parameter in group["params"]]
        gradients.update({parameter: parameter.grad.clone() for parameter in held})

    optimizer.outer.register_step_pre_hook(keep)
    for step in range(6):
        train(model, optimizer, comm, range(step, step + 1))
        if gradients:
            seen.append(torch.cat([gradients[parameter].reshape(-1) for parameter in model.parameters()]))
            gradients.clear()
            assert same_on_all_ranks(model, comm)
    assert len(seen) == optimizer.synchronizations == 3
    torch.testing.assert_close(parameters_of(model), own_rule(seen, 0.7, 0.9, start))


def test_heavy_ball_is_the_momentum_of_a_torch_optimizer(comm: Communicator) -> None:
    model, plain = make_model(), make_model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), Dense(), comm, synchronize="updates", outer=HEAVY_BALL
    )
    train(model, optimizer, comm, range(6))
    mean_gradient_steps(torch.optim.SGD(plain.parameters(), lr=0.05 * 0.7, momentum=0.9), plain, comm, 6)
    torch.testing.assert_close(parameters_of(model), parameters_of(plain))


def test_an_instance_moves_the_model_and_leaves_its_gradients(comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, by_instance in zip(models, (True, False), strict=True):
        outer = ADAM(model.parameters()) if by_instance else ADAM
        optimizer = updates(model, comm, outer=outer)
        assert (optimizer.outer is outer) == by_instance
        train(model, optimizer, comm, range(3))
        inputs, labels = batch(1000 * comm.rank + 3)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        assert all(torch.equal(one, p.grad) for one, p in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(*map(parameters_of, models))


def test_a_scheduler_moves_eta(comm: Communicator) -> None:
    model, plain = make_model(), make_model()
    for one, factor in ((model, 0.5), (plain, None)):
        optimizer = updates(one, comm, local_steps=2, outer=(1, 0))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.outer, factor) if factor else None
        train(one, optimizer, comm, range(2))
        at_1 = parameters_of(one)
        if schedule is not None:
            schedule.step()
            assert optimizer.outer.param_groups[0]["lr"] == 0.5
        train(one, optimizer, comm, range(2, 4))
    half = at_1 + (parameters_of(plain) - at_1) / 2
    torch.testing.assert_close(parameters_of(model), half)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_models_of_any_type_are_equal_on_all_ranks(dtype: torch.dtype, comm: Communicator) -> None:
    model = make_model(dtype=dtype)
    optimizer = updates(model, comm, Marsit(), local_steps=3, outer=(0.7, 0.9))
    train(model, optimizer, comm, range(9))
    assert optimizer.synchronizations == 3
    assert same_on_all_ranks(model, comm)
    assert {one.dtype for one in model.parameters()} == {dtype}


def test_a_model_is_not_moved_by_momentum_alone_where_a_round_fails(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, local_steps=2, outer=(0.7, 0.9))
    train(model, optimizer, comm, range(4))
    common = parameters_of(model)
    optimizer.outer.param_groups[0]["lr"] = 0.7 + 0.1 * comm.rank
    if comm.size > 1:
        with pytest.raises(CollectiveMismatch, match=r"'lr' of outer parameter group 0 is 0\.7 on rank 0"):
            train(model, optimizer, comm, range(4, 6))
        assert torch.equal(parameters_of(model), common)
        optimizer.outer.param_groups[0]["lr"] = 0.7
    train(model, optimizer, comm, range(4, 6))
    assert same_on_all_ranks(model, comm)


# States -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [4, 5], ids=["after a round", "in a round"])
@pytest.mark.parametrize("outer", [(0.7, 0.9), HEAVY_BALL, ADAM], ids=["pair", "heavy ball", "adam"])
@pytest.mark.parametrize("algorithm", [Dense(), Marsit(), SparseLoCo(16, 64)], ids=["dense", "marsit", "sparse_loco"])
def test_training_resumes_to_the_bit(algorithm: Any, outer: Any, at: int, comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, algorithm, optimizer="adam", local_steps=2, outer=outer)
    train(model, optimizer, comm, range(at))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(at, 10))
    resumed = make_model(seed=5)
    again = updates(resumed, comm, algorithm, optimizer="adam", local_steps=2, outer=outer)
    resumed.load_state_dict(parameters)
    again.check_state_dict(state)
    again.load_state_dict(state)
    train(resumed, again, comm, range(at, 10))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_a_state_without_or_of_another_outer_optimizer_is_refused(comm: Communicator) -> None:
    model = make_model()
    states = {}
    for name, outer in (("none", None), ("pair", (0.7, 0.9)), ("adam", ADAM)):
        optimizer = updates(make_model(), comm, outer=outer)
        train(model, optimizer, comm, range(1))
        states[name] = optimizer.state_dict()
    optimizer = updates(model, comm, outer=(0.7, 0.9))
    for name, message in (
        ("none", "only one of state and optimizer has an outer optimizer, the optimizer"),
        ("adam", "outer optimizer is 'Adam' over"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(states[name])
    damaged = copy.deepcopy(states["pair"])
    damaged["mpicomp"]["rounds"]["outer"]["state"] = {"0.weight": {"momentum_buffer": torch.zeros(3)}}
    with pytest.raises(ValueError, match=r"outer momentum of '0.weight' has shape \(3,\), not \(37, 10\)"):
        optimizer.load_state_dict(damaged)
    damaged["mpicomp"]["rounds"]["outer"]["state"] = {"0.weight": 3}
    with pytest.raises(ValueError, match="the outer SGD cannot load its part of the state"):
        optimizer.load_state_dict(damaged)
    with pytest.raises(ValueError, match="only one of state and optimizer has an outer optimizer, the state"):
        updates(model, comm).load_state_dict(states["pair"])
    optimizer.load_state_dict(states["pair"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_with_the_same_momentum(ranks: int) -> None:
    models = [make_model() for _ in range(3)]

    def save(comm: Communicator) -> Any:
        model = models[comm.rank]
        optimizer = updates(model, comm, SparseLoCo(16, 64), local_steps=2, outer=(0.7, 0.9))
        train(model, optimizer, comm, range(5))
        optimizer.synchronize()
        return optimizer.state_dict()

    states = run_local(2, save)
    others = redistribute_states(states, ranks)
    saved = states[0]["mpicomp"]["rounds"]["outer"]["state"]

    def resume(comm: Communicator) -> bool:
        model = copy.deepcopy(models[0]) if comm.rank else models[0]
        optimizer = updates(model, comm, SparseLoCo(16, 64), local_steps=2, outer=(0.7, 0.9))
        optimizer.load_state_dict(others[comm.rank])
        held = optimizer.state_dict()["mpicomp"]["rounds"]["outer"]["state"]
        return all(torch.equal(held[i]["momentum_buffer"], saved[i]["momentum_buffer"]) for i in saved)

    assert len(saved) == 4
    assert all(run_local(ranks, resume))


# Arguments ----------------------------------------------------------------------------------------------------------


MODEL = make_model()
WRONG: dict[str, tuple[Any, str]] = {
    "three": ((0.7, 0.9, 1), r"outer is \(0.7, 0.9, 1\); pass two numbers"),
    "text": (("0.7", 0.9), "pass two numbers"),
    "a flag": ((True, 0.9), "pass two numbers"),
    "no step": ((0, 0.9), "a step size eta of 0; choose a positive number"),
    "nan": ((float("nan"), 0.9), "a step size eta of nan"),
    "momentum": ((0.7, 1.0), "a momentum mu of 1.0; choose one from 0"),
    "number": (0.7, "outer is of type float; pass outer="),
    "function": (lambda parameters: 3, "outer returned 3, which is no optimizer"),
    "failure": (partial(torch.optim.SGD, lr=-1), r"cannot make an optimizer .*ValueError: Invalid learning rate: -1\)"),
    "closure": (partial(torch.optim.LBFGS), "outer is LBFGS, which needs a closure"),
    "lacks": (torch.optim.SGD(MODEL[0].parameters()), "lacks 2 of 4 trained parameters, the first of which is '2.weig"),
}


@pytest.mark.parametrize(("outer", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_refused_with_the_cure(outer: Any, message: str, comm: Communicator) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        updates(MODEL, comm, outer=outer)


def test_gradients_have_no_outer_optimizer(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r'outer=\(0.7, 0.9\) needs synchronize="updates"'):
        wrap(make_model(), Dense(), comm, outer=(0.7, 0.9))
    inner = updates(make_model(), comm)
    with pytest.raises(TypeError, match="outer is a DistributedOptimizer, which synchronizes the ranks itself"):
        updates(make_model(), comm, outer=inner)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [(0.7, 0.8), None, HEAVY_BALL], ids=["mu", "none", "sgd"])
def test_ranks_with_other_outer_options_are_refused(odd: Any, comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"outer=\(0.7, 0.9\)"):
        updates(make_model(), comm, outer=odd if comm.rank == comm.size - 1 else (0.7, 0.9))
    of_rank = partial(torch.optim.SGD, lr=0.7 + comm.rank)
    with pytest.raises(CollectiveMismatch, match=r"'lr' of outer parameter group 0 is 0\.7 on rank 0, 1\.7 on rank 1"):
        updates(make_model(), comm, outer=of_rank)


def test_ranks_without_batches_take_part(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="updates", local_steps=2, outer=(0.7, 0.9))
    for seed in optimizer.join(range(2 + 2 * comm.rank)):
        inputs, labels = batch(seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    assert optimizer.synchronizations == comm.size
    assert same_on_all_ranks(model, comm)


def test_a_grad_scaler_scales_the_inner_optimizer_alone(comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, scaled in zip(models, (True, False), strict=True):
        optimizer = updates(model, comm, local_steps=2, outer=(0.7, 0.9))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(6):
            inputs, labels = batch(1000 * comm.rank + step)
            optimizer.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(*map(parameters_of, models))


def test_an_outer_rate_that_changes_behind_backward_takes_the_new_mean(comm: Communicator) -> None:
    """A bucket that starts during backward must not leave its result packed for a plain step that does not come."""
    models = []
    for overlap in (False, True):
        model = make_model()
        optimizer = updates(model, comm, Marsit(None), outer=(1, 0), overlap=overlap)
        for step in range(6):
            inputs, labels = batch(1000 * comm.rank + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.outer.param_groups[0]["lr"] = 1 - 0.1 * (step % 2)
            optimizer.step()
        models.append(parameters_of(model))
    assert torch.equal(*models)


def test_the_outer_momentum_of_a_frozen_parameter_rests(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, Marsit(None), outer=(0.7, 0.6))
    train(model, optimizer, comm, range(4))
    frozen = model[0].weight
    momentum = optimizer.outer.state[frozen]["momentum_buffer"].clone()
    frozen.requires_grad_(False)
    train(model, optimizer, comm, range(4, 8))
    assert torch.equal(optimizer.outer.state[frozen]["momentum_buffer"], momentum)
