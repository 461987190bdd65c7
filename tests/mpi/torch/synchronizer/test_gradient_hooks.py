"""Gradients whose memory a loop replaces, or whose values it changes where PyTorch does not count it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense, Marsit
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = up_to_two_ranks
FUSED = {"synchronize": "updates", "overlap": True}
Change = Callable[[nn.Module], Any]


def for_each(change: Callable[[Tensor], Any]) -> Change:
    def apply(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            change(parameter)

    return apply


def rebind(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.data = torch.full_like(parameter.grad, 7.0)


def give_other_memory(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.set_(torch.full_like(parameter.grad, 7.0))


REBINDINGS: dict[str, Change] = {
    "grad.data": for_each(rebind),
    "grad.set_": for_each(give_other_memory),
    "double and float": lambda model: model.double().float(),
    "half and float": lambda model: model.half().float(),
    "memory format": lambda model: model.to(memory_format=torch.channels_last),
    "share_memory": lambda model: model.share_memory(),
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "detach_": for_each(lambda parameter: parameter.grad.detach_()),
    "a copy": for_each(lambda parameter: setattr(parameter, "grad", parameter.grad.clone())),
    "another view": for_each(lambda parameter: setattr(parameter, "grad", parameter.grad.view_as(parameter))),
}


@pytest.mark.parametrize("options", [{}, FUSED, {**FUSED, "local_steps": 2}], ids=["gradients", "updates", "local"])
@pytest.mark.parametrize("name", REBINDINGS)
def test_gradients_given_other_memory_between_steps_change_no_later_step(
    name: str, options: dict[str, Any], comm: Communicator
) -> None:
    models = [make_convolution(), make_convolution()]
    for model, touched in zip(models, (True, False), strict=True):
        optimizer = wrap(model, Dense(), comm, **options)
        for step in range(6):
            train(model, optimizer, comm, range(step, step + 1))
            if touched:
                REBINDINGS[name](model)
            elif name == "half and float":
                model.half().float()
    rounding = 1e-6 if name == "memory format" else 0.0  # PyTorch then convolves in another order
    torch.testing.assert_close(*map(parameters_of, models), rtol=0, atol=rounding)
    assert same_on_all_ranks(models[0], comm)


def make_convolution() -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.ReLU(), nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 3))
    return nn.Sequential(nn.Unflatten(1, (10, 1, 1)), nn.Conv2d(10, 4, 1), nn.Flatten(), head)


def replace_by_numpy(parameter: Tensor) -> None:
    assert parameter.grad is not None
    np.clip(parameter.grad.numpy(), -1e-3, 1e-3, out=parameter.grad.numpy())


def halve_by_dlpack(parameter: Tensor) -> None:
    np.from_dlpack(parameter.grad)[...] *= 0.5


BEHIND_BACKWARD: dict[str, Change] = {
    "data.clamp_": for_each(lambda parameter: parameter.grad.data.clamp_(-1e-3, 1e-3)),
    "data.mul_": for_each(lambda parameter: parameter.grad.data.mul_(0.5)),
    "data =": for_each(rebind),
    "data[:]": for_each(lambda parameter: parameter.grad.data.__setitem__(slice(None), 0.0)),
    "data.neg_": for_each(lambda parameter: parameter.grad.data.neg_()),
    "detach().add_": for_each(lambda parameter: parameter.grad.detach().add_(0.1)),
    "NumPy": for_each(replace_by_numpy),
    "DLPack": for_each(halve_by_dlpack),
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
}


def backward(model: nn.Module, comm: Communicator, step: int) -> None:
    inputs, labels = batch(1000 * comm.rank + step)
    nn.functional.cross_entropy(model(inputs), labels).backward()


@pytest.mark.parametrize("options", [{}, FUSED], ids=["gradients", "updates"])
@pytest.mark.parametrize(("bucket_mb", "steps"), [(0.001, 1), (0.001, 0), (25, 1), (25, 0)])
@pytest.mark.parametrize("name", BEHIND_BACKWARD)
def test_a_change_behind_backward_is_refused_for_models_of_any_size_and_no_rank_makes_the_step(
    name: str, bucket_mb: float, steps: int, options: dict[str, Any], comm: Communicator
) -> None:
    model = make_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = DistributedOptimizer(sgd, Dense(), comm, model.named_parameters(), bucket_mb=bucket_mb, **options)
    train(model, optimizer, comm, range(steps))
    before = parameters_of(model)
    optimizer.zero_grad()
    backward(model, comm, steps)
    BEHIND_BACKWARD[name](model)
    with pytest.raises(RuntimeError, match=r"gradient of '2\.bias' was changed or dropped .* no rank has made this"):
        optimizer.step()
    assert torch.equal(parameters_of(model), before)


def test_a_change_that_begins_late_is_found_within_a_few_steps(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(6))

    def change_too_late() -> None:
        for step in range(6, 9):
            optimizer.zero_grad()
            backward(model, comm, step)
            BEHIND_BACKWARD["data.mul_"](model)
            optimizer.step()

    with pytest.raises(RuntimeError, match="was changed or dropped"):
        change_too_late()


@pytest.mark.parametrize("options", [{"overlap": False}, {"synchronize": "updates"}])
@pytest.mark.parametrize("name", ["data.clamp_", "NumPy", "clip_grad_norm_"])
def test_changes_before_anything_was_sent_count(name: str, options: dict[str, Any], comm: Communicator) -> None:
    changed, plain = make_model(), make_model()
    options = {"bucket_mb": 0.001, **options}
    for model, touches in ((changed, True), (plain, False)):
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, Dense(), comm, model.named_parameters(), **options)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, comm, step)
            if touches:
                BEHIND_BACKWARD[name](model)
            optimizer.step()
    assert same_on_all_ranks(changed, comm)
    assert not torch.equal(*map(parameters_of, (changed, plain)))


# Steps that are dropped, and averaged by hand -------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("algorithm", [Dense(), Marsit(transactional=True)], ids=["dense", "marsit"])
def test_a_step_dropped_on_all_ranks_leaves_no_trace(algorithm: Any, overlap: bool, comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, drops in zip(models, (True, False), strict=True):
        optimizer = wrap(model, algorithm, comm, synchronize="gradients", overlap=overlap)
        for step in range(6):
            optimizer.zero_grad()
            if drops and step in (2, 3):
                backward(model, comm, 100 + step)
                optimizer.zero_grad()
            backward(model, comm, step)
            optimizer.step()
    assert same_on_all_ranks(models[0], comm)
    if isinstance(algorithm, Dense):
        assert torch.equal(*map(parameters_of, models))


@pytest.mark.mpi(min_size=2)
def test_a_step_dropped_on_one_rank_alone_is_an_error_on_all(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    backward(model, comm, 2)
    before = parameters_of(model)
    with pytest.raises(CollectiveMismatch, match=r"rank 1 dropped the gradients of this step by zero_grad\(\), while"):
        optimizer.zero_grad() if comm.rank == 1 else optimizer.step()
    assert torch.equal(parameters_of(model), before)
    optimizer.zero_grad()
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_whose_gradients_zero_grad_has_dropped_is_refused(overlap: bool, comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, overlap=overlap)
    train(model, optimizer, comm, range(2))
    backward(model, comm, 2)
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) between backward\(\) and step\(\) has dropped"):
        optimizer.step()
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_loop_written_for_horovod_clips_the_mean(overlap: bool, comm: Communicator) -> None:
    models = [make_model(), make_model()]
    for model, skips in zip(models, (True, False), strict=True):
        optimizer = wrap(model, Dense(), comm, overlap=overlap)
        with pytest.raises(RuntimeError, match=r"skip_synchronize\(\) where no gradients have been averaged"):
            optimizer.skip_synchronize().__enter__()
        for step in range(3):
            optimizer.zero_grad()
            backward(model, comm, step)
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if skips:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
    assert torch.equal(*map(parameters_of, models))


# The first step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"synchronize": "updates"}], ids=str)
@pytest.mark.parametrize("name", ["sgd", "lbfgs"])
def test_a_closure_serves_the_first_step_too(name: str, options: dict[str, Any], comm: Communicator) -> None:
    model = make_model()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1) if name == "lbfgs" else torch.optim.SGD(model.parameters())
    optimizer = DistributedOptimizer(inner, Dense(), comm, bucket_mb=0.001, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        inputs, labels = batch(comm.rank)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        # each rank's LBFGS follows its own loss under "updates", by evaluations of its own number
        return loss if optimizer.mode == "updates" else comm.allreduce(loss.detach(), op="mean")

    first, *_, last = [optimizer.step(closure).item() for _ in range(4)]
    assert last < first
    assert same_on_all_ranks(model, comm)


def test_sparse_gradients_may_move_parameters_during_backward(comm: Communicator) -> None:
    torch.manual_seed(0)
    first, second = nn.Embedding(9, 40, sparse=True), nn.Embedding(9, 40, sparse=True)
    head = nn.Linear(80, 3)
    model = nn.ModuleList([first, second, head])
    optimizer = wrap(model, Dense(), comm, **FUSED)
    for step in range(4):
        optimizer.zero_grad()
        found = first(torch.tensor([step, comm.rank])), second(torch.tensor([step, 8]))
        nn.functional.cross_entropy(head(torch.cat(found, 1)), torch.tensor([0, 1])).backward()
        optimizer.step()
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("algorithm", [Dense(), Marsit()], ids=["dense", "marsit"])
@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_that_a_loop_keeps_are_no_change_though_their_mean_lands_early(
    zeroes: bool, algorithm: Any, comm: Communicator
) -> None:
    model, optimizer = wrapped(algorithm, comm, synchronize="gradients")
    for step in range(6):
        if zeroes:
            optimizer.zero_grad(set_to_none=False)
        backward(model, comm, step)
        time.sleep(0.02)  # in which the means of the first buckets are written to the gradients' memory
        optimizer.step()
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(parting=True)
def test_an_error_of_a_dropped_step_is_raised_on_all_ranks(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(2))
    optimizer.zero_grad()
    backward(model, comm, 2)
    with pytest.raises(CollectiveMismatch, match="barrier"):
        optimizer.zero_grad() if comm.rank == 0 else comm.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_without_a_batch_makes_the_step_of_the_others_though_it_has_dropped_a_probe(
    overlap: bool, comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm, overlap=overlap)
    train(model, optimizer, comm, range(2))
    backward(model, comm, 100)  # a probe, whose gradients nobody wants
    optimizer.zero_grad()
    if comm.rank:
        backward(model, comm, 2)
    optimizer.step()
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [{}, {"overlap": False}, FUSED], ids=["gradients", "one by one", "updates"])
def test_an_optimizer_is_gone_at_once_after_a_step_that_raised(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    gc.disable()
    try:
        optimizer.zero_grad()
        backward(model, comm, 2)
        if options.get("overlap", True):
            BEHIND_BACKWARD["data.mul_"](model)
        else:
            BEHIND_BACKWARD["data ="](model)
            model[0].bias.grad.fill_(float("nan"))
        with pytest.raises(RuntimeError) as raised:
            optimizer.step()
        del optimizer, raised
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    finally:
        gc.enable()


@pytest.mark.parametrize("completes", [False, True], ids="a later backward completes it: {}".format)
def test_a_change_of_a_gradient_is_refused_though_its_bucket_lacks_another_one(
    comm: Communicator, completes: bool
) -> None:
    """Gradients of a complete bucket are noted together, those of the others at the end of backward."""
    model, optimizer = wrapped(Dense(), comm, synchronize="gradients", overlap=True)
    train(model, optimizer, comm, range(2))
    assert any({"2.weight", "2.bias"} <= {*names} for names in optimizer.buckets)
    inputs, labels = batch(comm.rank)
    optimizer.zero_grad()
    nn.functional.cross_entropy(nn.functional.linear(model[:2](inputs), model[2].weight), labels).backward()
    model[2].weight.grad.mul_(2)
    if completes:
        model[2].bias.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of '2\.weight' was changed"):
        optimizer.step()


def test_a_gradient_that_lacks_a_pass_may_be_changed_before_it(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="gradients", overlap=True, backward_passes_per_step=2)
    inputs, labels = batch(comm.rank)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    nn.functional.cross_entropy(nn.functional.linear(model[:2](inputs), model[2].weight), labels).backward()
    model[2].bias.grad.mul_(2)
    optimizer.step()
