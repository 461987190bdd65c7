"""Calls in the caller's modes, such as `torch.inference_mode()`: the training goes on as without them, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from mpicomp import Dense, DoubleSqueeze, Marsit
from mpicomp.torch import DistributedOptimizer, OneBitAdam, broadcast_optimizer_state
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, wrap

pytestmark = up_to_two_ranks

STEPS = 8


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Any] = {
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "default_device": default_device,
    "default_dtype": default_dtype,
}


def one_bit_adam(model: nn.Module, comm: Communicator) -> OneBitAdam:
    return OneBitAdam(model.named_parameters(), lr=0.01, warmup_steps=3, comm=comm)


def outer(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    return wrap(model, Dense(), comm, synchronize="updates", local_steps=4, outer=(0.7, 0.6))


def fragments(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    return wrap(model, Marsit(), comm, synchronize="updates", local_steps=4, fragments=2, delay=1, blend=0.25)


def gradients(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    return wrap(model, DoubleSqueeze(), comm, synchronize="gradients")


def updates(model: nn.Module, comm: Communicator) -> DistributedOptimizer:
    return wrap(model, Marsit(), comm, "adam", synchronize="updates")


KINDS = {one.__name__: one for one in (gradients, updates, outer, fragments, one_bit_adam)}
WITH_MASTERS = ("updates", "one_bit_adam")


def trained(kind: str, comm: Communicator, mode: Any) -> torch.Tensor:
    """Train with all calls of every other step in a mode, and return the parameters."""
    dtype = torch.bfloat16 if kind in WITH_MASTERS else torch.float32
    model = make_model(dtype=dtype)
    with mode():
        optimizer = KINDS[kind](model, comm)
    for step in range(STEPS):
        here = nullcontext if step % 2 else mode
        inputs, labels = batch(1000 * comm.rank + step, dtype)
        with here():
            optimizer.zero_grad(set_to_none=step % 4 < 2)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        with here():
            assert optimizer.param_groups
            if isinstance(optimizer, DistributedOptimizer) and step < 3:
                optimizer.synchronize()
            optimizer.step()
        if isinstance(optimizer, DistributedOptimizer):
            with here(), optimizer.common_model():
                pass
        if step >= 4:
            with here():
                optimizer.load_state_dict(optimizer.state_dict())
    return parameters_of(model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_no_mode_of_the_caller_changes_a_bit_of_the_training(mode: str, kind: str, comm: Communicator) -> None:
    assert torch.equal(trained(kind, comm, MODES[mode]), trained(kind, comm, torch.no_grad))


def test_a_state_that_was_broadcast_in_inference_mode_can_be_stepped_with(comm: Communicator) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    if comm.rank == 0:
        optimizer.step()
    with torch.inference_mode():
        broadcast_optimizer_state(optimizer, comm)
    optimizer.step()
