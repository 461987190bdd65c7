"""Communication during backward: the same bits, begun early, and clear errors for loops that cannot work."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Auto, Dense, DoubleSqueeze, Marsit, ScaleCom
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = up_to_two_ranks
FORMS: dict[str, Any] = {
    "dense": (Dense(), "gradients"),
    "dense, 16 bits": (Dense(wire="bfloat16"), "gradients"),
    "marsit, gradients": (Marsit(3), "gradients"),
    "scalecom": (ScaleCom(rate=8), "gradients"),
    "doublesqueeze": (DoubleSqueeze(), "gradients"),
    "marsit, updates": (Marsit(3), "updates"),
    "auto": (Auto(DoubleSqueeze(), trial_steps=25), "gradients"),  # on trial, so that nothing depends on time
    "auto, updates": (Auto(Marsit(3), trial_steps=25), "updates"),
}


class Branches(nn.Module):
    """Some of its layers have no gradient at some steps, not the same ones on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(10, 12)
        self.maybe = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.last = nn.Linear(12, 3)

    def forward(self, inputs: Tensor, chosen: list[bool]) -> Tensor:
        x = self.first(inputs).relu()
        for layer, take in zip(self.maybe, chosen, strict=True):
            x = layer(x).relu() if take else x
        out: Tensor = self.last(x)
        return out


def train_branches(optimizer: DistributedOptimizer, model: Branches, comm: Communicator, steps: int) -> None:
    draw = random.Random(comm.rank)
    for step in range(steps):
        inputs, labels = batch(1000 * comm.rank + step)
        chosen = [draw.random() < 0.7 for _ in range(4)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs, chosen), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("form", FORMS)
def test_overlap_changes_no_bit_whatever_gradients_are_missing(form: str, comm: Communicator) -> None:
    algorithm, mode = FORMS[form]
    models = [Branches() for _ in range(2)]
    for model, overlap in zip(models, (False, True), strict=True):
        optimizer = wrap(model, algorithm, comm, synchronize=mode, overlap=overlap)
        train_branches(optimizer, model, comm, 12)
        assert same_on_all_ranks(model, comm)
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_parameters_and_gradients_keep_their_memory_layout(mode: str, comm: Communicator) -> None:
    torch.manual_seed(0)
    models = [nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    images = torch.rand(2, 3, 6, 6).to(memory_format=torch.channels_last)
    for model, overlap in zip(models, (False, True), strict=True):
        optimizer = wrap(model, Dense(), comm, synchronize=mode, overlap=overlap)
        for _ in range(4):
            optimizer.zero_grad()
            (comm.rank + model(images)).square().mean().backward()
            optimizer.step()
        assert model.weight.is_contiguous(memory_format=torch.channels_last)
        assert model.weight.grad is not None
        assert model.weight.grad.stride() == model.weight.stride()
    assert torch.equal(*map(parameters_of, models))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_ranks_choose_alike_by_what_they_measure(mode: str, overlap: bool, comm: Communicator) -> None:
    auto = Auto(Marsit(3), trial_steps=2, retry_every=30)
    model, optimizer = wrapped(auto, comm, synchronize=mode, overlap=overlap)
    train(model, optimizer, comm, range(75))
    assert same_on_all_ranks(model, comm)
    plans = [one.state_dict()["auto"].tolist() for one in optimizer.aggregators]
    assert len(plans) > 1
    assert len({str(of_rank) for of_rank in comm.mpi_comm.allgather(plans)}) == 1
    assert comm.size == 1 or all(plan[1] > 0 for plan in plans)  # trials have ended


@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_all_buckets_but_the_last_have_begun_when_backward_returns(mode: str, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode, overlap=True)
    train(model, optimizer, comm, range(1))  # which lays out the buckets
    queue: BucketQueue = optimizer._synchronizer._early.queue
    inputs, labels = batch(comm.rank)
    before = parameters_of(model)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    assert queue.n_started == len(optimizer.aggregators) - 1 > 0  # the last one waits for the step
    assert torch.equal(parameters_of(model), before)
    optimizer.step()
    assert queue.n_started == 0
    assert not torch.equal(parameters_of(model), before)
    assert same_on_all_ranks(model, comm)


def test_without_threads_in_mpi_the_hooks_make_progress(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.group.calls.is_supported", lambda comm: False)
    models = [make_model() for _ in range(2)]
    for model, overlap in zip(models, (False, True), strict=True):
        train(model, wrap(model, Marsit(3), comm, synchronize="gradients", overlap=overlap), comm, range(5))
    assert torch.equal(*map(parameters_of, models))


def test_buckets_are_laid_out_in_the_order_of_gradients(comm: Communicator) -> None:
    model = nn.ModuleDict({"used last": nn.Linear(10, 3), "used first": nn.Linear(10, 10), "unused": nn.Linear(2, 2)})
    optimizer = wrap(model, Dense(), comm)
    model["used last"](model["used first"](torch.ones(1, 10))).sum().backward()
    optimizer.step()
    names = [name.rpartition(".")[0] for bucket in optimizer.state_dict()["mpicomp"]["buckets"] for name in bucket]
    assert names == ["used last"] * 2 + ["used first"] * 2 + ["unused"] * 2


@pytest.mark.parametrize("how", ["no_sync", "backward_passes_per_step"])
@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_gradients_of_several_backwards_are_added_up(how: str, mode: str, comm: Communicator) -> None:
    options: dict[str, Any] = {"backward_passes_per_step": 3} if how != "no_sync" else {}
    model, optimizer = wrapped(Dense(), comm, synchronize=mode, overlap=True, **options)
    whole, expected = wrapped(Dense(), comm, synchronize=mode, overlap=False)
    for step in range(3):
        batches = [batch(1000 * comm.rank + 10 * step + k) for k in range(3)]
        optimizer.zero_grad()
        expected.zero_grad()

        def loss(net: nn.Module, k: int, batches: Any = batches) -> Tensor:
            return nn.functional.cross_entropy(net(batches[k][0]), batches[k][1])

        if how == "no_sync":
            with optimizer.no_sync():
                loss(model, 0).backward()
                loss(model, 1).backward()
            loss(model, 2).backward()
        else:
            for k in range(3):
                loss(model, k).backward()
        optimizer.step()
        for k in range(3):
            loss(whole, k).backward()
        expected.step()
    assert torch.equal(parameters_of(model), parameters_of(whole))


def loss_of(model: nn.Module, comm: Communicator, step: int) -> Tensor:
    inputs, labels = batch(1000 * comm.rank + step)
    return nn.functional.cross_entropy(model(inputs), labels)


@pytest.mark.parametrize("mode", ["gradients", "updates"])
def test_a_second_backward_is_refused_where_it_happens(mode: str, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode, overlap=True)
    train(model, optimizer, comm, range(1))
    optimizer.zero_grad()
    loss_of(model, comm, 1).backward()
    with pytest.raises(RuntimeError, match=r"came once more after it was sent.*no_sync\(\).*model\.zero_grad"):
        loss_of(model, comm, 1).backward()
    with pytest.raises(RuntimeError, match="was changed or dropped between"):  # by it
        optimizer.step()
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize(
    ("averages", "overlap"), [("synchronize", False), ("synchronize", True), ("param_groups", True)]
)
def test_gradients_that_come_after_the_averaging_are_refused(
    averages: str, paused: bool, overlap: bool, comm: Communicator
) -> None:
    """Two losses over different layers: those of the second one would stay this rank's own."""
    model, optimizer = wrapped(Dense(), comm, overlap=overlap)
    train(model, optimizer, comm, range(1))
    optimizer.zero_grad()
    inputs, _ = batch(comm.rank)
    model[0](inputs).square().mean().backward()
    if averages == "synchronize":
        optimizer.synchronize()
    else:
        assert optimizer.param_groups
    loss = model[2](torch.ones(4, 37)).square().mean()
    late = pytest.raises(RuntimeError, match=r"'2\..*' came after the gradients of this step were averaged")
    with optimizer.no_sync() if paused else nullcontext(), late:
        loss.backward()
    optimizer.zero_grad()
    train(model, optimizer, comm, range(1, 3))
    assert same_on_all_ranks(model, comm)


def test_zero_grad_before_the_step_is_refused_where_parameters_have_moved(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="updates", overlap=True)
    train(model, optimizer, comm, range(1))
    loss_of(model, comm, 1).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert same_on_all_ranks(model, comm)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize("change", [clip, nn.Module.zero_grad], ids=["clipped", "dropped"])
def test_gradients_changed_after_they_were_sent_are_named(
    change: Callable[[nn.Module], None], comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(1))
    optimizer.zero_grad()
    loss_of(model, comm, 1).backward()
    if comm.rank == 0:
        change(model)
    told = r"rank 0 of .*: the gradient of '2\.bias' was changed or dropped between backward\(\) and step\(\)"
    with pytest.raises((RuntimeError, CollectiveMismatch), match=told):
        optimizer.step()


def test_the_mean_can_be_clipped_after_synchronize(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(1))
    optimizer.zero_grad()
    loss_of(model, comm, 1).backward()
    optimizer.synchronize()
    clip(model)
    optimizer.step()
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize(("mode", "overlap"), [("gradients", False), ("gradients", True), ("updates", False)])
def test_an_overflow_on_one_rank_skips_the_step_on_all_with_a_gradscaler(
    mode: str, overlap: bool, unscale: bool, comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode, overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    unscaled, plain = wrapped(Dense(), comm, synchronize=mode, overlap=overlap)
    for step in range(5):
        bad = step == 2
        before = parameters_of(model)
        optimizer.zero_grad()
        loss = loss_of(model, comm, step)
        scaler.scale(loss * float("inf") if bad and comm.rank == comm.size - 1 else loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameters_of(model), before) == bad
        assert set(comm.mpi_comm.allgather(scaler.get_scale())) == {512.0 if step >= 2 else 1024.0}
        assert same_on_all_ranks(model, comm)
        if not bad:
            train(unscaled, plain, comm, range(step, step + 1))
    torch.testing.assert_close(parameters_of(model), parameters_of(unscaled))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradscaler_lowers_its_scale_until_gradients_are_in_the_range_of_float16(
    overlap: bool, comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(wire="float16"), comm, overlap=overlap)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    moved, scales = [], [scaler.get_scale()]
    for step in range(16):
        before = parameters_of(model)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, comm, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(parameters_of(model), before))
        scales.append(scaler.get_scale())
        assert same_on_all_ranks(model, comm)
    assert not moved[0]
    assert any(moved)
    assert moved == [after == scale for scale, after in pairwise(scales)]
    assert set(comm.mpi_comm.allgather(tuple(scales))) == {tuple(scales)}


def test_the_model_may_drop_the_gradients_of_a_step_that_a_gradscaler_skipped(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        model.zero_grad()
        loss = loss_of(model, comm, step)
        scaler.scale(loss * float("inf") if step == 1 and comm.rank == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.synchronizations == 3
    assert same_on_all_ranks(model, comm)


def test_a_gradscaler_is_refused_where_backward_moves_parameters(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="updates", overlap=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, comm, 0)).backward()
    with pytest.raises(RuntimeError, match="a GradScaler cannot be combined with overlap"):
        scaler.step(optimizer)


def test_nan_surfaces_in_step_on_all_ranks_though_it_was_found_before(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(1))
    before = parameters_of(model)
    optimizer.zero_grad()
    loss = loss_of(model, comm, 1)
    (loss * float("nan") if comm.rank == comm.size - 1 else loss).backward()
    optimizer.synchronize()
    assert all(parameter.grad is not None and parameter.grad.isnan().all() for parameter in model.parameters())
    with pytest.raises(NonFiniteGradient) as raised:
        optimizer.step()
    assert raised.value.ranks == (comm.size - 1,)
    assert torch.equal(parameters_of(model), before)
    optimizer.zero_grad()
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


def test_algorithms_by_pattern_and_by_function_have_buckets_of_their_own(comm: Communicator) -> None:
    by_pattern = wrap(make_model(), {"*.bias": Dense(), "*": Marsit(5)}, comm)
    by_function = wrap(make_model(), lambda name, p: Dense() if p.ndim == 1 else Marsit(5), comm)
    for optimizer in by_pattern, by_function:
        assert optimizer.mode == "updates"  # Marsit's preference
        optimizer.step()
        state = optimizer.state_dict()["mpicomp"]
        chosen = {
            name: aggregator["method"]
            for names, aggregator in zip(state["buckets"], state["aggregators"], strict=True)
            for name in names
        }
        assert chosen == {"0.weight": "Marsit", "2.weight": "Marsit", "0.bias": "Dense", "2.bias": "Dense"}


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"*.bias": Dense()}, r"no pattern among '\*\.bias' fits '0\.weight'; end the choices with '\*'"),
        (lambda name, p: None, "the algorithm of '0.weight' is None"),
        (
            lambda name, p: {}[name],
            r"no algorithm is chosen for '0\.weight' \(KeyError: '0\.weight'\); pass a function",
        ),
        ({"*.bias": ScaleCom(), "*": Marsit()}, "the algorithms differ in what they prefer.*pass synchronize="),
        (ScaleCom(rates=(8, 8, 8, 8)), r"choose by parameter: algorithm=lambda"),
    ],
)
def test_choices_that_leave_questions_are_refused(choice: Any, told: str, comm: Communicator) -> None:
    with pytest.raises(ValueError, match=told):
        wrap(make_model(), choice, comm)


def test_wrapping_twice_is_refused(comm: Communicator) -> None:
    _, optimizer = wrapped(Dense(), comm)
    with pytest.raises(TypeError, match="is a DistributedOptimizer already"):
        DistributedOptimizer(optimizer, Dense(), comm)


@pytest.mark.parametrize("kind", ["compiled", "checkpointed"])
def test_compiled_and_checkpointed_models_train_alike(kind: str, comm: Communicator) -> None:
    models = [make_model() for _ in range(2)]
    for model, special in zip(models, (False, True), strict=True):
        optimizer = wrap(model, Dense(), comm)
        called: Callable[[Tensor], Tensor] = model
        if special and kind == "compiled":
            called = torch.compile(model, backend="aot_eager")
        elif special:
            called = lambda inputs, model=model: checkpoint(model, inputs, use_reentrant=False)  # noqa: E731
        for step in range(3):
            inputs, labels = batch(1000 * comm.rank + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(inputs), labels).backward()
            optimizer.step()
    torch.testing.assert_close(*map(parameters_of, models))


def test_a_fresh_optimizer_takes_over_the_buckets_of_a_state(comm: Communicator) -> None:
    model = Branches()
    optimizer = wrap(model, ScaleCom(rate=8), comm)
    train_branches(optimizer, model, comm, 3)
    state, kept = copy.deepcopy(optimizer.state_dict()), parameters_of(model)
    train_branches(optimizer, model, comm, 3)
    expected = parameters_of(model)
    again = Branches()
    nn.utils.vector_to_parameters(kept, again.parameters())
    resumed = wrap(again, ScaleCom(rate=8), comm)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["mpicomp"]["buckets"] == state["mpicomp"]["buckets"]
    train_branches(resumed, again, comm, 3)
    assert torch.equal(parameters_of(again), expected)


def test_a_state_of_a_renamed_parameter_names_it(comm: Communicator) -> None:
    model, optimizer = wrapped(ScaleCom(rate=8), comm)
    train(model, optimizer, comm, range(1))
    renamed = nn.Sequential(model[0], model[1], nn.Sequential(model[2]))
    fresh = DistributedOptimizer(
        torch.optim.SGD(renamed.parameters(), lr=0.1), ScaleCom(rate=8), comm, renamed.named_parameters()
    )
    told = r"the state has '2\.bias', '2\.weight', which this optimizer lacks; this optimizer has '2\.0\.bias'"
    with pytest.raises(ValueError, match=told):
        fresh.load_state_dict(optimizer.state_dict())
