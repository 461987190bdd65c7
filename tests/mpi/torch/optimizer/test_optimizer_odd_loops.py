"""Loops in an unusual order, or with mistakes: ranks stay equal, and errors name the cure."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, DoubleSqueeze, Marsit
from mpicomp.torch import DistributedOptimizer, OneBitAdam, require_same
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from tests.mpi.lanes import TIMEOUT_S, few_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = few_ranks
FUSED = {"synchronize": "updates", "overlap": True}


def loss_of(model: nn.Module, comm: Communicator, step: int = 0) -> Tensor:
    inputs, labels = batch(1000 * comm.rank + step)
    return nn.functional.cross_entropy(model(inputs), labels)


def replace(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    optimizer.param_groups[0]["params"][2] = model[2].weight = nn.Parameter(torch.zeros(3, 37))


def replace_list(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model[2].weight = nn.Parameter(torch.zeros(3, 37))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def reshape(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model[0].weight.data, model[0].bias.data, model[2].weight.data = (
        torch.ones(36, 10),
        torch.ones(36),
        torch.ones(3, 36),
    )


def widen(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model.double()


@pytest.mark.parametrize("mode", ["gradients", "updates"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace, r"the torch optimizer no longer holds parameter '2\.weight', .*; make both optimizers again"),
        (replace_list, r"the torch optimizer no longer holds parameter '2\.weight', .*; make both optimizers again"),
        (
            reshape,
            r"parameter '0\.weight' was torch\.float32\[37, 10\] on cpu when .* is torch\.float32\[36, 10\] on cpu",
        ),
        (
            widen,
            r"parameter '0\.weight' was torch\.float32\[37, 10\] on cpu when .* is torch\.float64\[37, 10\] on cpu",
        ),
    ],
)
def test_a_model_that_was_changed_after_wrapping_is_named(
    change: Callable[[nn.Module, DistributedOptimizer], None], told: str, mode: str, comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize=mode)
    train(model, optimizer, comm, range(2))
    model.zero_grad()
    change(model, optimizer)
    with pytest.raises(ValueError, match=told):
        train(model, optimizer, comm, range(2, 3))


def test_a_mistake_of_all_ranks_leaves_the_communicator_and_what_is_in_flight(comm: Communicator) -> None:
    model, optimizer = wrapped(DoubleSqueeze(), comm)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    loss_of(model, comm).backward()
    values = model[0].weight.data
    model[0].weight.data = values.double()
    with pytest.raises(ValueError, match=r"'0\.weight' was torch\.float32"):
        optimizer.step()
    model[0].weight.data = values
    optimizer.step()
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_an_optimizer_may_be_let_go_behind_backward(options: dict[str, Any], mpi_comm: MPI.Comm) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    loss_of(model, comm).backward()
    del model, optimizer
    gc.collect()
    comm.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_of_the_optimizer_that_fails_leaves_the_common_model_where_it_was(
    overlap: bool, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="updates", overlap=overlap)
    train(model, optimizer, comm, range(2))
    before = [(one.data_ptr(), one.detach().clone()) for one in model.parameters()]

    def fail() -> None:
        optimizer.param_groups[0]["params"][0].data.zero_()
        raise ArithmeticError

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.optimizer, "step", fail)
        with pytest.raises(ArithmeticError):
            train(model, optimizer, comm, range(2, 3))
    if overlap:  # the step ended before it came to the failure during backward
        with pytest.raises(ArithmeticError):
            optimizer.step()
    for one, (place, values) in zip(model.parameters(), before, strict=True):
        assert one.data_ptr() == place
        assert torch.equal(one, values)
    optimizer.zero_grad()
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(parting=True)
@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_what_keeps_one_rank_from_beginning_a_bucket_is_told_to_all(
    options: dict[str, Any], comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    if comm.rank == 0:

        def begin(reducer: BucketReducer) -> None:
            raise ValueError("there is no more of it")

        monkeypatch.setattr(BucketReducer, "begin", begin)
    with pytest.raises((ValueError, CollectiveMismatch), match="there is no more of it"):
        train(model, optimizer, comm, range(2, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(parting=True)
def test_a_bucket_that_one_rank_cannot_start_during_backward_moves_no_model(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the step before are still there, and must not settle this one."""
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DistributedOptimizer(inner, Dense(), comm, model.named_parameters(), bucket_mb=1e-4, **FUSED)
    train(model, optimizer, comm, range(2))
    assert len(optimizer.aggregators) > 2
    before = parameters_of(model)
    if comm.rank == 0:
        start = BucketReducer.begin

        def begin(reducer: BucketReducer) -> Any:
            if reducer.bucket.index == 1:  # during backward, when the first one is under way
                raise ValueError("there is no more of it")
            return start(reducer)

        monkeypatch.setattr(BucketReducer, "begin", begin)
    with pytest.raises((ValueError, CollectiveMismatch), match="there is no more of it"):
        train(model, optimizer, comm, range(2, 3))
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("kind", [DistributedOptimizer, OneBitAdam])
def test_two_parameters_of_one_name_are_refused(kind: type, comm: Communicator) -> None:
    named = [pair for model in (make_model(), make_model(1)) for pair in model.named_parameters()]
    parameters = [parameter for _, parameter in named]
    make: dict[type, Callable[[], Any]] = {
        DistributedOptimizer: lambda: DistributedOptimizer(torch.optim.SGD(parameters), Dense(), comm, named),
        OneBitAdam: lambda: OneBitAdam(parameters, comm=comm, named_parameters=named),
    }
    with pytest.raises(ValueError, match=r"2 parameters are called '0\.weight'; give each a name of its own"):
        make[kind]()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_optimizers_that_communicate_are_not_copied(copied: Callable[[Any], Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    for one in optimizer, OneBitAdam(model.parameters(), comm=comm):
        with pytest.raises(TypeError, match=r"is not copied or pickled; copy or save its state_dict\(\)"):
            copied(one)


def test_masters_that_an_earlier_wrapper_left_are_refused(comm: Communicator) -> None:
    model = make_model(dtype=torch.bfloat16)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DistributedOptimizer(inner, Marsit(), comm, model.named_parameters())
    with pytest.raises(ValueError, match=r"is a float32 master that an earlier .*; make a new torch optimizer"):
        DistributedOptimizer(inner, Marsit(), comm, model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"synchronize": "updates"}, FUSED], ids=["gradients", "updates", "fused"])
def test_a_dropped_optimizer_is_gone_at_once(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(DoubleSqueeze(), comm, **options)
    train(model, optimizer, comm, range(3))
    gc.disable()
    try:
        del optimizer
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"synchronize": "updates", "local_steps": 2}], ids=["gradients", "updates"])
def test_a_model_is_freed_once_it_and_its_optimizer_are_dropped(options: dict[str, Any], comm: Communicator) -> None:
    """Records of calls do not keep it, neither those of steps nor that of a refusal."""
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(4))
    require_same(model, comm)
    model.double()
    with pytest.raises(ValueError, match="make both optimizers again"):
        train(model, optimizer, comm, range(4, 6))
    parameter = weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert parameter() is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_an_optimizer_that_lives_on_sends_nothing_once_another_has_its_parameters(
    options: dict[str, Any], comm: Communicator
) -> None:
    model = make_model()
    earlier = wrap(model, Dense(), comm, **options)
    train(model, earlier, comm, range(2))
    if comm.rank == 0:
        del earlier  # as a garbage collection may do on one rank before it does so on another
    optimizer = wrap(model, Dense(), comm, **options)
    train(model, optimizer, comm, range(2, 6))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_what_is_out_of_place_between_backward_and_step_is_refused(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(DoubleSqueeze(), comm, **options)
    train(model, optimizer, comm, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model, comm).backward()
    calls: list[Callable[[], Any]] = [optimizer.state_dict, lambda: optimizer.load_state_dict(saved)]
    for call in calls + [optimizer.zero_grad, optimizer.synchronize] * bool(options):
        with pytest.raises(RuntimeError, match=r"\(\) between backward\(\) and step\(\), .*; call it after step\(\)"):
            call()
    optimizer.step()
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_training_goes_on_after_a_backward_that_was_cut_off(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))

    def fail(gradient: Tensor) -> None:
        raise ArithmeticError

    optimizer.zero_grad()
    failing = model[0].weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loss_of(model, comm).backward()
    failing.remove()
    if options:
        with pytest.raises(RuntimeError, match=r"after a backward\(\) that was cut off, call step\(\) first"):
            optimizer.zero_grad()
        optimizer.step()
    train(model, optimizer, comm, range(2, 5))
    assert same_on_all_ranks(model, comm)


def test_gradients_changed_after_they_moved_parameters_are_named(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **FUSED)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    loss_of(model, comm).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.001)
    with pytest.raises(RuntimeError, match=r"gradient of '2\.bias' was changed .* after the optimizer had moved"):
        optimizer.step()
    train(model, optimizer, comm, range(2, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
def test_ranks_stay_alike_where_one_alone_changes_a_gradient(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    loss_of(model, comm).backward()
    before = parameters_of(model)
    told, expected = "was changed or dropped", RuntimeError
    if comm.rank == 0:
        model.zero_grad()
    else:
        told, expected = rf"rank 0 refuses the step: .*{told}.*No rank has made the step", CollectiveMismatch
    with pytest.raises(expected, match=told):
        optimizer.step()
    assert torch.equal(parameters_of(model), before)
    train(model, optimizer, comm, range(3, 6))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("bad", [0, 2])
def test_scales_stay_equal_though_gradients_are_unscaled_before_the_step(bad: int, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, comm, step)
        scaler.scale(loss * float("inf") if step == bad and comm.rank == 0 else loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert set(comm.mpi_comm.allgather(scaler.get_scale())) == {512.0}
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("clips", ["the model", "the optimizer"])
def test_16_bit_gradients_are_clipped_where_the_optimizer_has_them(clips: str, comm: Communicator) -> None:
    model = make_model().half()
    optimizer = wrap(model, Dense(), comm, synchronize="updates", overlap=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    inputs, labels = batch(comm.rank)
    before = parameters_of(model)
    for attempt in range(2):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(inputs.half()), labels)).backward()
        scaler.unscale_(optimizer)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if clips == "the model" and not attempt:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
            with pytest.raises(RuntimeError, match=r"clip the optimizer's parameters, .* instead of the model's"):
                scaler.step(optimizer)
            assert torch.equal(parameters_of(model), before)
        else:
            nn.utils.clip_grad_norm_(held, 1e-6)
            scaler.step(optimizer)
            assert (parameters_of(model) - before).abs().max() < 1e-4
        scaler.update()
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("kind", ["updates", "OneBitAdam"])
@pytest.mark.parametrize("clips", ["the model", "the optimizer"])
def test_16_bit_gradients_are_clipped_in_both_places_without_a_scaler(
    clips: str, kind: str, comm: Communicator
) -> None:
    model = make_model(dtype=torch.bfloat16)
    if kind == "updates":
        optimizer = wrap(model, Dense(), comm, synchronize="updates", local_steps=2)
    else:
        optimizer = OneBitAdam(model.parameters(), comm=comm, warmup_steps=10)
    for step in range(2):
        optimizer.zero_grad()
        inputs, labels = batch(comm.rank + step)
        nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
        held = [one for group in optimizer.param_groups for one in group["params"]]
        norm = nn.utils.clip_grad_norm_(held if clips == "the optimizer" else model.parameters(), 0.0)
        assert norm > 0.1
        before = parameters_of(model)
        optimizer.step()
        assert torch.equal(parameters_of(model), before)


def test_16_bit_gradients_that_come_behind_a_clipping_are_refused(comm: Communicator) -> None:
    model = make_model(dtype=torch.bfloat16)
    optimizer = wrap(model, Dense(), comm, synchronize="updates")
    inputs, labels = batch(comm.rank)
    for _ in range(2):
        nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
        held = [one for group in optimizer.param_groups for one in group["params"]]
        nn.utils.clip_grad_norm_(held, 0.1)
    optimizer.step()  # those of both, which were clipped together
    nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
    nn.utils.clip_grad_norm_([one for group in optimizer.param_groups for one in group["params"]], 0.1)
    nn.functional.cross_entropy(model(inputs.bfloat16()), labels).backward()
    with pytest.raises(RuntimeError, match=r"came or were changed after those of their float32 copies"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, comm, range(2))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_a_loop_changes_between_local_steps_stay_changed(dtype: torch.dtype, comm: Communicator) -> None:
    model = make_model(dtype=dtype)
    optimizer = wrap(model, Dense(), comm, synchronize="updates", local_steps=8)
    for step in range(6):
        train(model, optimizer, comm, range(step, step + 1))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
    optimizer.synchronize()
    assert parameters_of(model).abs().max() < 0.02
    assert same_on_all_ranks(model, comm)


def test_an_error_in_a_later_evaluation_leaves_the_common_model_of_16_bits(comm: Communicator) -> None:
    model = make_model(dtype=torch.bfloat16)
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    optimizer = DistributedOptimizer(inner, Dense(), comm, model.named_parameters(), synchronize="updates")
    inputs, labels = batch(0)  # of all ranks, which then evaluate as often
    before, evaluations = parameters_of(model), 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        if evaluations == 3:
            raise ArithmeticError("in the closure")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.bfloat16()), labels)
        loss.backward()
        return loss

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert torch.equal(parameters_of(model), before)


def test_a_gradscaler_is_refused_in_join(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    scaler = torch.amp.GradScaler("cpu")
    for step in optimizer.join(range(1)):
        scaler.scale(loss_of(model, comm, step)).backward()
        with pytest.raises(RuntimeError, match=r"a GradScaler cannot be combined with join\(\)"):
            scaler.step(optimizer)
        optimizer.step()
    scaler.step(optimizer)


@pytest.mark.parametrize("layer", [0, 2], ids=["last bucket", "first bucket"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_nan_in_one_bucket_leaves_no_trace_in_the_others(overlap: bool, layer: int, comm: Communicator) -> None:
    model, optimizer = wrapped(DoubleSqueeze(), comm, overlap=overlap)
    train(model, optimizer, comm, range(3))
    before = copy.deepcopy(optimizer.state_dict()["mpicomp"]["aggregators"])
    assert len(before) == 2
    optimizer.zero_grad()
    model[layer].weight.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NonFiniteGradient):
        train(model, optimizer, comm, range(3, 4))
    for was, now in zip(before, optimizer.state_dict()["mpicomp"]["aggregators"], strict=True):
        assert was.keys() == now.keys()
        for key, value in was.items():
            assert torch.equal(value, now[key]) if torch.is_tensor(value) else value == now[key]
