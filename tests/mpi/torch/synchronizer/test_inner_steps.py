"""Steps of a wrapped optimizer that its wrapper does not make: refused, or made with averaged gradients as SAM's."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train

pytestmark = up_to_two_ranks
REFUSED = r"step\(\) outside of DistributedOptimizer\.step\(\), with gradients of this rank alone"
modes = pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_mb": 0.001},
        {"overlap": False},
        {"synchronize": "updates", "local_steps": 2},
        {"synchronize": "updates", "overlap": True, "bucket_mb": 0.001},
        {"synchronize": "updates", "local_steps": 2, "delay": 1},
    ],
    ids=str,
)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization, which delegates to another optimizer."""

    def __init__(self, params: Iterable[Tensor], lr: float, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        self._before = [one.clone() for one in parameters]
        for one in parameters:
            one.add_(one.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for one, before in zip((p for group in self.param_groups for p in group["params"]), self._before, strict=True):
            one.copy_(before)
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, labels = batch(1000 * rank + step)
    return nn.functional.cross_entropy(model(inputs), labels)


def wrapped_sgd(comm: Communicator, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, DistributedOptimizer]:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, inner, DistributedOptimizer(inner, Dense(), comm, model.named_parameters(), **options)


@modes
def test_a_step_of_the_wrapped_optimizer_itself_is_refused(options: dict[str, Any], comm: Communicator) -> None:
    model, inner, optimizer = wrapped_sgd(comm, **options)
    train(model, optimizer, comm, range(4))
    before = parameters_of(model)
    with pytest.raises(RuntimeError, match=r"SGD\." + REFUSED):
        train(model, inner, comm, range(4, 5))
    assert torch.equal(parameters_of(model), before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{}, {"bucket_mb": 0.001}, {"overlap": False}, {"synchronize": "updates"}], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_all_ranks_raise_where_one_steps_the_wrapped_optimizer(
    steps: int, options: dict[str, Any], comm: Communicator
) -> None:
    model, inner, optimizer = wrapped_sgd(comm, **options)
    train(model, optimizer, comm, range(steps))
    with pytest.raises((RuntimeError, CollectiveMismatch), match=REFUSED):
        train(model, inner if comm.rank == 1 else optimizer, comm, range(steps, steps + 1))


def test_a_scaler_that_steps_the_wrapped_optimizer_is_refused(comm: Communicator) -> None:
    model, inner, optimizer = wrapped_sgd(comm)
    scaler = torch.amp.GradScaler("cpu")
    for step, stepped in enumerate((optimizer, optimizer, inner)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, comm.rank, step)).backward()
        if stepped is inner:
            with pytest.raises(RuntimeError, match=REFUSED):
                scaler.step(stepped)
        else:
            scaler.step(stepped)
            scaler.update()


def test_the_wrapped_optimizer_may_step_with_averaged_gradients(comm: Communicator) -> None:
    model, inner, optimizer = wrapped_sgd(comm)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, comm.rank, step).backward()
        optimizer.synchronize()
        inner.step()
    other, _, expected = wrapped_sgd(comm)
    train(other, expected, comm, range(3))
    assert torch.equal(parameters_of(model), parameters_of(other))
    loss_of(model, comm.rank, 3).mul(float("nan")).backward()
    optimizer.synchronize()
    with pytest.raises(NonFiniteGradient):
        inner.step()


def test_an_optimizer_without_gradients_may_step_to_make_its_state(comm: Communicator) -> None:
    model, inner, optimizer = wrapped_sgd(comm)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    inner.step()
    train(model, optimizer, comm, range(2))
    assert same_on_all_ranks(model, comm)


class Complete(torch.optim.SGD):
    """Optimizer whose copies have its hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


@pytest.mark.parametrize("kind", [torch.optim.SGD, Complete])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
def test_copies_of_the_wrapped_optimizer_are_plain(
    duplicate: Callable[[Any], Any], kind: type[torch.optim.SGD], comm: Communicator
) -> None:
    model = make_model()
    inner = kind(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, Dense(), comm)
    train(model, optimizer, comm, range(1))
    loss_of(model, comm.rank, 1).backward()
    other = duplicate(inner)
    for parameter in other.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other.step()


def test_the_wrapped_optimizer_is_plain_again_without_its_wrapper(comm: Communicator) -> None:
    model, inner, optimizer = wrapped_sgd(comm)
    train(model, optimizer, comm, range(2))
    del optimizer
    gc.collect()
    train(model, inner, comm, range(2))


def test_two_wrappers_of_one_optimizer_may_step_it(comm: Communicator) -> None:
    model, inner, first = wrapped_sgd(comm)
    train(model, first, comm, range(2))
    second = DistributedOptimizer(inner, Dense(), comm, model.named_parameters())
    for step, optimizer in enumerate((second, first, second, second)):
        train(model, optimizer, comm, range(step, step + 1))
    assert same_on_all_ranks(model, comm)
    with pytest.raises(RuntimeError, match=REFUSED):
        train(model, inner, comm, range(1))


# SAM ------------------------------------------------------------------------------------------------------------------


def sam_by_hand(comm: Communicator, steps: int) -> nn.Module:
    """A loop of SAM over the mean of all ranks' gradients, which are all computed here."""
    model = make_model()
    optimizer = SAM(model.parameters(), lr=0.1)
    for step in range(steps):
        for place, half in enumerate((optimizer.first_step, optimizer.second_step)):
            losses = [loss_of(model, rank, 2 * step + place) for rank in range(comm.size)]
            gradients = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
            for parameter, of_ranks in zip(model.parameters(), zip(*gradients, strict=True), strict=True):
                parameter.grad = torch.stack(of_ranks).sum(0) / comm.size
            half()
    return model


@pytest.mark.parametrize("by_closure", [False, True])
@pytest.mark.parametrize("options", [{}, {"bucket_mb": 0.001}, {"overlap": False}], ids=str)
def test_sam_with_averaged_gradients_at_both_points_is_that_by_hand(
    options: dict[str, Any], by_closure: bool, comm: Communicator
) -> None:
    model = make_model()
    sam = SAM(model.parameters(), lr=0.1)
    optimizer: Any = DistributedOptimizer(sam, Dense(), comm, model.named_parameters(), **options)

    def backward(step: int) -> Tensor:
        loss = loss_of(model, comm.rank, step)
        loss.backward()
        return loss

    for step in range(5):
        backward(2 * step)
        optimizer.synchronize()
        if by_closure:
            optimizer.step(lambda step=step: backward(2 * step + 1))
            continue
        optimizer.first_step()
        backward(2 * step + 1)
        optimizer.synchronize()
        optimizer.second_step()
    assert optimizer.synchronizations == 10
    torch.testing.assert_close(parameters_of(model), parameters_of(sam_by_hand(comm, 5)), rtol=0, atol=1e-7)
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("through_wrapper", [True, False])
@pytest.mark.parametrize("options", [{}, {"synchronize": "updates"}], ids=str)
@pytest.mark.parametrize("name", ["first_step", "second_step"])
def test_a_step_of_sam_with_gradients_of_one_rank_is_refused(
    name: str, options: dict[str, Any], through_wrapper: bool, comm: Communicator
) -> None:
    model = make_model()
    sam = SAM(model.parameters(), lr=0.1)
    optimizer: Any = DistributedOptimizer(sam, Dense(), comm, **options)
    sam._before = [one.detach().clone() for one in model.parameters()]
    loss_of(model, comm.rank, 0).backward()
    if not through_wrapper and name == "first_step":
        sam.first_step()  # moves this rank's copy, and is found at the next point
        loss_of(model, comm.rank, 1).backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        getattr(optimizer if through_wrapper else sam, name if through_wrapper else "second_step")()


def test_nan_is_raised_before_a_step_of_sam(comm: Communicator) -> None:
    model = make_model()
    optimizer: Any = DistributedOptimizer(SAM(model.parameters(), lr=0.1), Dense(), comm)
    before = parameters_of(model)
    loss_of(model, comm.rank, 0).mul(float("nan") if comm.rank == 0 else 1.0).backward()
    optimizer.synchronize()
    with pytest.raises(NonFiniteGradient):
        optimizer.first_step()
    assert torch.equal(parameters_of(model), before)
