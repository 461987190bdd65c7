"""Fragments of local steps: their schedule, the means that come late, states with fragments in flight."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, DoubleSqueeze, Marsit, Relay, SparseLoCo, run_local
from mpicomp.torch import DistributedOptimizer, broadcast_parameters, redistribute_states, require_same
from mpicomp.torch.synchronizer import synchronizer
from tests.mpi.lanes import few_ranks, two_ranks
from tests.mpi.torch.training import batch, make_model, on_all_ranks, parameters_of, same_on_all_ranks, train, wrap

pytestmark = few_ranks

DENSE = Dense()
CARRIERS: dict[str, Any] = {
    "dense": DENSE, "marsit": Marsit(10), "sparse_loco": SparseLoCo(16, 64), "double_squeeze": DoubleSqueeze(),
    "relay": Relay(),
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "in turns": {"local_steps": 4, "fragments": 2},
    "each step": {"local_steps": 2, "fragments": 2},
    "whole, late": {"local_steps": 3, "delay": 2},
    "in turns, late": {"local_steps": 4, "fragments": 2, "delay": 1},
    "two in flight": {"local_steps": 4, "fragments": 2, "delay": 3},
    "blended": {"local_steps": 4, "fragments": 2, "delay": 2, "blend": 0.5},
    "blended at once": {"local_steps": 3, "fragments": 2, "blend": 0.25},
    "keeping steps": {"local_steps": 4, "fragments": 2, "delay": 3, "blend": "steps"},
    "keeping steps of the whole": {"local_steps": 3, "delay": 1, "blend": "steps"},
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def updates(model: nn.Module, comm: Communicator, algorithm: Any = DENSE, **options: Any) -> DistributedOptimizer:
    """Wrap momentum SGD with local steps in buckets of 1 kB."""
    return wrap(model, algorithm, comm, synchronize="updates", **options)


class Reference:
    """The rule of fragments, written down tensor by tensor, with exact means over the ranks."""

    def __init__(self, model: nn.Module, comm: Communicator, outer: tuple[float, float], **plan: Any) -> None:
        self.comm, self.outer = comm, outer
        self.steps, self.fragments = plan["local_steps"], plan.get("fragments", 1)
        self.delay, self.blend = plan.get("delay", 0), plan.get("blend", 0.0)
        self.local = dict(model.named_parameters())
        self.common = {name: one.detach().clone() for name, one in self.local.items()}
        self.momentum = {name: torch.zeros_like(one) for name, one in self.common.items()}
        self.sent: list[tuple[int, dict[str, Tensor], dict[str, Tensor]]] = []
        self.step = 0

    def fragment(self, number: int) -> list[str]:
        return [name for name in self.local if {"0": 0, "2": 1}[name[0]] % self.fragments == number]

    @torch.no_grad()
    def after_step(self) -> None:
        self.step += 1
        for one in [one for one in self.sent if one[0] == self.step]:
            self.apply(*one[1:])
            self.sent = [other for other in self.sent if other is not one]
        for number in range(self.fragments):
            if self.step % self.steps == number * self.steps // self.fragments:
                means = {}
                for name in self.fragment(number):
                    move = self.common[name] - self.local[name].detach()
                    means[name] = torch.stack(on_all_ranks(move, self.comm)).mean(0)
                copies = {name: self.local[name].detach().clone() for name in means}
                if self.delay:
                    self.sent.append((self.step + self.delay, means, copies))
                else:
                    self.apply(means, copies)

    def apply(self, means: dict[str, Tensor], copies: dict[str, Tensor]) -> None:
        eta, mu = self.outer
        for name, mean in means.items():
            self.momentum[name] = mu * self.momentum[name] + mean
            self.common[name] -= eta * (mean + mu * self.momentum[name])
            local = self.local[name]
            if self.blend == "steps":
                local.add_(self.common[name] - copies[name])
                continue
            local.copy_(self.blend * local + (1 - self.blend) * self.common[name])


@plans
@pytest.mark.parametrize("outer", [(1.0, 0.0), (0.7, 0.6)])
def test_each_rank_goes_the_way_of_the_rule(outer: tuple[float, float], plan: Any, comm: Communicator) -> None:
    model, by_rule = make_model(), make_model()
    optimizer = updates(model, comm, outer=outer, **plan)
    rule = Reference(by_rule, comm, outer, **plan)
    inner = torch.optim.SGD(by_rule.parameters(), lr=0.05, momentum=0.9)
    for step in range(11):
        train(model, optimizer, comm, range(step, step + 1))
        train(by_rule, inner, comm, range(step, step + 1))
        rule.after_step()
        torch.testing.assert_close(parameters_of(model), parameters_of(by_rule))
        with optimizer.common_model():
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.detach(), rule.common[name])


@plans
def test_common_models_are_compared_as_a_whole_from_time_to_time(
    plan: Any, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizer, "COMPARE_EVERY", 4)
    model = make_model()
    optimizer = updates(model, comm, Marsit(None), outer=(0.7, 0.6), **plan)
    train(model, optimizer, comm, range(20))  # equal models pass
    if comm.rank == 0:
        with optimizer.common_model(), torch.no_grad():
            model[0].weight[36, 9] += 1e-3
    told = r"the ranks' models differ in \d of 4 tensors, the first of which is '0.weight' \(checksum .* on rank"
    with pytest.raises(CollectiveMismatch, match=told) if comm.size > 1 else nullcontext():
        train(model, optimizer, comm, range(20, 60))
    broadcast_parameters(model, comm)
    train(model, optimizer, comm, range(60, 80))
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)


@plans
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_replicas_of_the_common_model_are_equal_to_the_bit_at_any_time(
    algorithm: Any, plan: Any, comm: Communicator
) -> None:
    model = make_model()
    optimizer = updates(model, comm, algorithm, optimizer="adam", outer=(0.7, 0.6), **plan)
    start = parameters_of(model)
    for step in range(10):
        train(model, optimizer, comm, range(step, step + 1))
        local = parameters_of(model)
        with optimizer.common_model():
            assert same_on_all_ranks(model, comm)
        assert torch.equal(parameters_of(model), local)
    optimizer.synchronize()
    assert not optimizer.models_differ
    assert same_on_all_ranks(model, comm)
    require_same(model, comm)
    assert not torch.equal(parameters_of(model), start)


@pytest.mark.parametrize("outer", [None, (0.7, 0.9)])
@pytest.mark.parametrize("algorithm", [DENSE, SparseLoCo(2, 4)], ids=["dense", "sparse_loco"])
def test_fragments_without_delay_are_runs_of_their_own(algorithm: Any, outer: Any, comm: Communicator) -> None:
    """Three tensors that do not meet in the loss, in three fragments, against an optimizer for each."""

    def tensors() -> list[nn.Parameter]:
        return [nn.Parameter(torch.linspace(-1, 1, 12) + i) for i in range(3)]

    def step(optimizers: list[DistributedOptimizer], parameters: list[nn.Parameter], seed: int) -> None:
        generator = torch.Generator().manual_seed(100 * comm.rank + seed)
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum((one * torch.randn(12, generator=generator)).square().sum() for one in parameters).backward()
        for optimizer in optimizers:
            optimizer.step()

    def wrapped(parameters: list[nn.Parameter], **options: Any) -> DistributedOptimizer:
        sgd = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        return DistributedOptimizer(sgd, algorithm, comm, synchronize="updates", local_steps=3, outer=outer, **options)

    together, alone = tensors(), tensors()
    one, each = wrapped(together, fragments=3), [wrapped([parameter]) for parameter in alone]
    for seed in range(8):
        step([one], together, seed)
        step(each, alone, seed)
        for number in (1, 2):
            if seed + 1 == number:  # fragment p is sent after p steps for the first time
                each[number].synchronize()
        for mine, theirs in zip(together, alone, strict=True):
            assert torch.equal(mine, theirs)


@two_ranks
def test_a_rank_goes_on_while_the_other_has_not_sent_its_fragment(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, local_steps=2, delay=1)
    train(model, optimizer, comm, range(1))
    plain = comm.mpi_comm.Dup()
    if comm.rank == 1:
        plain.recv(source=0)  # until rank 0 has sent, and has left its step
    train(model, optimizer, comm, range(1, 2))
    if comm.rank == 0:
        plain.send(None, dest=1)
    plain.Free()
    train(model, optimizer, comm, range(2, 4))
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)


def test_relay_keeps_the_steps_of_the_delay(comm: Communicator) -> None:
    """One tensor, against the rule written down around an aggregator of its own."""
    ours, local = (nn.Parameter(torch.linspace(-1, 1, 4096)) for _ in range(2))
    sgd = torch.optim.SGD([ours], lr=0.1)
    optimizer = DistributedOptimizer(sgd, Relay(), comm, local_steps=3, delay=2, blend="steps")
    relay = Relay().start(comm, 4096, tensor_shapes=((4096,),))
    common, generator = local.detach().clone(), torch.Generator().manual_seed(comm.rank)
    sent = mean = torch.zeros(4096)
    for step in range(1, 12):
        gradient = torch.randn(4096, generator=generator)
        ours.grad = gradient.clone()
        optimizer.step()
        with torch.no_grad():
            local -= 0.1 * gradient
            if step % 3 == 2:
                common = common - mean
                local += (common - sent) * (step > 3)
            if step % 3 == 0:
                sent = local.detach().clone()
                mean = torch.from_numpy(relay.aggregate((common - sent).numpy()).copy())
        torch.testing.assert_close(ours, local)
    with optimizer.common_model():
        torch.testing.assert_close(ours.detach(), common)


@pytest.mark.parametrize("fragments", [1, 2])
def test_without_a_delay_no_steps_are_there_to_keep(fragments: int, comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, blend in zip(models, (0.0, "steps"), strict=True):
        optimizer = updates(model, comm, Relay(), local_steps=4, fragments=fragments, blend=blend)
        train(model, optimizer, comm, range(9))
    assert torch.equal(*map(parameters_of, models))


def test_a_state_without_the_moves_in_flight_is_refused_where_steps_are_kept(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, local_steps=4, delay=3)
    train(model, optimizer, comm, range(5))
    again = updates(make_model(), comm, local_steps=4, delay=3, blend="steps")
    with pytest.raises(
        ValueError, match=r"fragment 0 in flight lacks the moves .* with the blend= of the one that was"
    ):
        again.load_state_dict(optimizer.state_dict())
    train(model, optimizer, comm, range(5, 9))
    train(model, again, comm, range(4))  # nothing was changed


@plans
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algorithm", CARRIERS.values(), ids=CARRIERS)
def test_training_resumes_to_the_bit_at_any_step(
    algorithm: Any, dtype: torch.dtype, plan: Any, comm: Communicator
) -> None:
    model = make_model(dtype=dtype)
    optimizer = updates(model, comm, algorithm, optimizer="adam", outer=(0.7, 0.9), **plan)
    saved = {}
    for step in range(7):
        train(model, optimizer, comm, range(step, step + 1))
        if step >= 2:
            saved[step + 1] = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(7, 12))
    for at, (parameters, state) in saved.items():
        resumed = make_model(seed=5, dtype=dtype)
        again = updates(resumed, comm, algorithm, optimizer="adam", outer=(0.7, 0.9), **plan)
        if at % 2:
            resumed.load_state_dict(parameters)
        again.check_state_dict(state)
        again.load_state_dict(state)
        if not at % 2:
            resumed.load_state_dict(parameters)
        train(resumed, again, comm, range(at, 12))
        assert torch.equal(parameters_of(resumed), parameters_of(model)), at
        assert again.synchronizations == optimizer.synchronizations


def test_an_optimizer_goes_back_to_a_state_while_fragments_are_in_flight(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, Marsit(), local_steps=4, fragments=2, delay=3)
    train(model, optimizer, comm, range(5))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(5, 9))
    expected = parameters_of(model)
    model.load_state_dict(parameters)
    optimizer.load_state_dict(state)
    train(model, optimizer, comm, range(5, 9))
    assert torch.equal(parameters_of(model), expected)


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_ranks_go_on_with_the_same_momentum(ranks: int) -> None:
    plan = PLANS["blended"]
    models = [make_model() for _ in range(3)]

    def save(comm: Communicator) -> Any:
        model = models[comm.rank]
        optimizer = updates(model, comm, SparseLoCo(16, 64), outer=(0.7, 0.9), **plan)
        train(model, optimizer, comm, range(7))
        middle = optimizer.state_dict()
        optimizer.synchronize()
        return middle, optimizer.state_dict()

    saved = run_local(2, save)
    with pytest.raises(ValueError, match="was saved in the middle of local steps"):
        redistribute_states([middle for middle, _ in saved], ranks)
    states = redistribute_states([state for _, state in saved], ranks)
    momentum = saved[0][1]["mpicomp"]["rounds"]["outer"]["state"]

    def resume(comm: Communicator) -> bool:
        model = copy.deepcopy(models[0]) if comm.rank else models[0]
        optimizer = updates(model, comm, SparseLoCo(16, 64), outer=(0.7, 0.9), **plan)
        optimizer.load_state_dict(states[comm.rank])
        held = optimizer.state_dict()["mpicomp"]["rounds"]["outer"]["state"]
        return all(torch.equal(held[i]["momentum_buffer"], momentum[i]["momentum_buffer"]) for i in momentum)

    assert len(momentum) == 4
    assert all(run_local(ranks, resume))


def test_states_of_other_fragments_are_refused_in_the_middle(comm: Communicator) -> None:
    model, whole = make_model(), make_model()
    optimizer = updates(model, comm, **PLANS["two in flight"])
    train(model, optimizer, comm, range(5))
    state = optimizer.state_dict()
    assert state["mpicomp"]["rounds"]["fragments"]["in_flight"]
    with pytest.raises(ValueError, match="fragments in flight; build the optimizer with the same fragments"):
        updates(make_model(), comm, local_steps=4).load_state_dict(state)
    sgd = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
    in_one_bucket = DistributedOptimizer(sgd, DENSE, comm, whole.named_parameters(), "updates", local_steps=4)
    train(whole, in_one_bucket, comm, range(4))
    with pytest.raises(ValueError, match=r"was saved with other fragments, which have '2.bias' in one bucket"):
        updates(make_model(), comm, local_steps=4, fragments=2).load_state_dict(in_one_bucket.state_dict())
    damaged = copy.deepcopy(state)
    del damaged["mpicomp"]["rounds"]["fragments"]["in_flight"][0]["means"]["0.bias"]
    with pytest.raises(ValueError, match="the state's means differs in "):
        updates(make_model(), comm, **PLANS["two in flight"]).load_state_dict(damaged)


@pytest.mark.parametrize("plan", ["in turns", "in turns, late", "blended", "keeping steps of the whole"])
def test_ranks_are_equal_after_a_nan_and_go_on(plan: str, comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, **PLANS[plan])
    train(model, optimizer, comm, range(3))
    optimizer.zero_grad()
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == comm.size - 1:
        model[0].weight.grad[0, 0] = float("nan")
    failed = []
    for step in range(4):
        try:
            optimizer.step() if step == 0 else train(model, optimizer, comm, range(step, step + 1))
        except NonFiniteGradient:
            failed.append(step)
            break
    assert len(failed) == 1
    assert len(set(comm.mpi_comm.allgather(failed[0]))) == 1
    assert not optimizer.models_differ
    assert same_on_all_ranks(model, comm)
    optimizer.optimizer.state.clear()  # the rank's momentum holds the NaN
    train(model, optimizer, comm, range(10))
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)


def test_options_that_differ_are_found_where_the_means_are_applied(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, local_steps=4, delay=2, outer=(0.7, 0.9))
    train(model, optimizer, comm, range(3))
    optimizer.outer.param_groups[0]["momentum"] = 0.9 + 0.01 * comm.rank
    train(model, optimizer, comm, range(3, 5))
    if comm.size > 1:
        with pytest.raises(CollectiveMismatch, match=r"'momentum' of outer parameter group 0 is 0\.9 on rank 0"):
            train(model, optimizer, comm, range(5, 6))
        optimizer.outer.param_groups[0]["momentum"] = 0.9
    assert comm.size == 1 or same_on_all_ranks(model, comm)


def test_ranks_without_batches_and_gradient_scalers(comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, Marsit(), outer=(0.7, 0.9), **PLANS["blended"])
    for seed in optimizer.join(range(5 + 2 * comm.rank)):
        inputs, labels = batch(seed)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        inputs, labels = batch(1000 * comm.rank + step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(inputs), labels)).backward()
        if step == 2 and comm.rank == comm.size - 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)


def test_nothing_steps_while_the_common_model_is_shown(comm: Communicator) -> None:
    model = make_model(dtype=torch.bfloat16)
    optimizer = updates(model, comm, local_steps=3)
    start = parameters_of(model)
    train(model, optimizer, comm, range(2))
    local = parameters_of(model)
    with optimizer.common_model():
        assert torch.equal(parameters_of(model), start)
        for call in (optimizer.step, optimizer.synchronize):
            with pytest.raises(RuntimeError, match=r"within common_model\(\); leave that block first"):
                call()
    assert torch.equal(parameters_of(model), local)
    gradients = wrap(make_model(), DENSE, comm)
    with gradients.common_model():
        pass


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no fragment": ({"fragments": 0}, "fragments is 0; choose a whole number, 1 or more"),
    "half a fragment": ({"fragments": 1.5}, "fragments is 1.5"),
    "more than steps": ({"fragments": 5}, "fragments=5 is more than local_steps=4"),
    "more than tensors": ({"local_steps": 9, "fragments": 5}, "fragments=5 is more than the 4 trained tensors"),
    "negative delay": ({"delay": -1}, "delay is -1; choose a whole number of steps"),
    "long delay": ({"delay": 4}, "delay=4 is no less than local_steps=4"),
    "blend of 1": ({"blend": 1}, "blend is 1; choose a number from 0"),
    "text": ({"blend": "step"}, "blend is 'step'; choose a number .* or 'steps'"),
    "overlap": ({"delay": 1, "overlap": True}, "overlap=True, which averages the whole model during backward"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_refused_with_the_cure(options: dict[str, Any], message: str, comm: Communicator) -> None:
    with pytest.raises(ValueError, match=message):
        updates(make_model(), comm, **{"local_steps": 4, **options})


def test_gradients_have_no_fragments(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r'fragments, delay and blend need synchronize="updates"'):
        wrap(make_model(), DENSE, comm, fragments=2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [{"fragments": 2}, {"delay": 1}, {"blend": 0.5}, {"blend": "steps"}], ids=str)
def test_ranks_with_other_fragments_are_refused(odd: dict[str, Any], comm: Communicator) -> None:
    (name,) = odd
    with pytest.raises(CollectiveMismatch, match=f"{name}="):
        updates(make_model(), comm, local_steps=4, **(odd if comm.rank == comm.size - 1 else {}))


@pytest.mark.parametrize("plan", [{"local_steps": 2}, {"local_steps": 4, "fragments": 2}], ids=str)
def test_parameters_that_join_have_momentum_and_fragments(plan: dict[str, Any], comm: Communicator) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = updates(model, comm, outer=(0.7, 0.9), **{**plan, "fragments": min(2, plan.get("fragments", 1))})
    train(model, optimizer, comm, range(5))
    model[0].requires_grad_(True)
    train(model, optimizer, comm, range(5, 9))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert set(state["mpicomp"]["rounds"]["outer"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    train(model, optimizer, comm, range(9, 14))
    with optimizer.common_model():
        assert same_on_all_ranks(model, comm)
    resumed = make_model(seed=5)
    again = updates(resumed, comm, outer=(0.7, 0.9), **plan)
    resumed.load_state_dict(parameters)
    again.load_state_dict(state)
    train(resumed, again, comm, range(9, 14))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


def test_parameters_that_join_with_another_fragment_keep_their_moves_until_theirs_is_due(comm: Communicator) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = updates(model, comm, local_steps=4, fragments=2)
    train(model, optimizer, comm, range(6))
    model[0].requires_grad_(True)  # joins in step 8 with fragment 0, and is of fragment 1
    start = model[0].weight.detach().clone()
    train(model, optimizer, comm, range(6, 9))
    moved = model[0].weight.detach().clone()
    assert not torch.equal(moved, start)
    with optimizer.common_model():
        assert torch.equal(model[0].weight, start)
    assert torch.equal(model[0].weight, moved)
    train(model, optimizer, comm, range(9, 10))
    assert not torch.equal(model[0].weight, start)
    assert same_on_all_ranks(model[0], comm)
    train(model, optimizer, comm, range(10, 20))
    with optimizer.common_model():
        assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("at", [5, 6, 7, 8, 11, 12])
@pytest.mark.parametrize("plan", [{"local_steps": 1}, {"local_steps": 3}, PLANS["in turns"]], ids=str)
def test_an_optimizer_whose_parameters_join_loads_a_state_that_has_or_lacks_them(
    plan: dict[str, Any], at: int, comm: Communicator
) -> None:
    def start() -> tuple[nn.Module, DistributedOptimizer]:
        model = make_model()
        model[0].requires_grad_(False)
        return model, updates(model, comm, outer=(0.7, 0.9), **plan)

    model, optimizer = start()
    train(model, optimizer, comm, range(5))
    model[0].requires_grad_(True)
    train(model, optimizer, comm, range(5, at))
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm, range(at, 16))
    resumed, again = start()
    resumed[0].requires_grad_(True)
    resumed.load_state_dict(parameters)
    again.load_state_dict(state)
    train(resumed, again, comm, range(at, 16))
    assert torch.equal(parameters_of(resumed), parameters_of(model))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("first", range(3, 8))
@pytest.mark.parametrize("plan", ["whole, late", "in turns, late", "two in flight", "blended", "keeping steps"])
def test_a_rank_that_freezes_alone_is_refused_by_all_in_one_step(plan: str, first: int, comm: Communicator) -> None:
    model = make_model()
    optimizer = updates(model, comm, **PLANS[plan])
    train(model, optimizer, comm, range(first))
    odd = comm.rank == comm.size - 1
    model[0].weight.requires_grad_(not odd)
    refused = None
    for step in range(first, first + 10):
        try:
            train(model, optimizer, comm, range(step, step + 1))
        except (ValueError, CollectiveMismatch) as error:
            refused, seen = step, error
            break
    assert refused is not None
    assert isinstance(seen, ValueError if odd else CollectiveMismatch)
    assert "'0.weight' was frozen" in str(seen)
    assert len(set(comm.mpi_comm.allgather(refused))) == 1
    assert same_on_all_ranks(model, comm)
    model[0].weight.requires_grad_(True)
    for step in range(refused + 1, refused + 4):  # in which a second fragment may have been refused
        try:
            train(model, optimizer, comm, range(step, step + 1))
        except (ValueError, CollectiveMismatch):
            continue
    optimizer.synchronize()
    assert same_on_all_ranks(model, comm)


def test_parameters_do_not_join_where_means_come_late(comm: Communicator) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = updates(model, comm, local_steps=4, delay=1)
    train(model, optimizer, comm, range(1))
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"'0.weight' was added or unfrozen, which delay= and blend= do not allow"):
        train(model, optimizer, comm, range(1, 5))
