"""`torch.compile` around our calls: they run as they are, and the ranks train the models that they train without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import Unsupported
from torch._inductor import config as inductor_config

from collectives import Communicator
from mpicomp import DoubleSqueeze, Marsit
from mpicomp.torch import OneBitAdam, average_buffers
from tests.mpi.lanes import two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, wrap

pytestmark = two_ranks
STEPS = 4
Step = Callable[[Tensor], object]
Form = Callable[[nn.Module, Communicator], Any]


def _overlapping(model: nn.Module, comm: Communicator) -> Any:
    return wrap(model, Marsit(3), comm, overlap=True)


def _local_steps(model: nn.Module, comm: Communicator) -> Any:
    return wrap(model, Marsit(3), comm, overlap=True, local_steps=2)


def _gradients(model: nn.Module, comm: Communicator) -> Any:
    return wrap(model, DoubleSqueeze(), comm)


def _one_bit_adam(model: nn.Module, comm: Communicator) -> Any:
    return OneBitAdam(model.parameters(), lr=0.005, warmup_steps=2, comm=comm)


FORMS: dict[str, Form] = {
    "updates": _overlapping,
    "updates, local steps": _local_steps,
    "gradients": _gradients,
    "OneBitAdam": _one_bit_adam,
}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().sum().mul(0.05).backward()


def train(comm: Communicator, make_step: Callable[[nn.Module, Any], Step], form: Form) -> nn.Module:
    model = make_model()
    optimizer = form(model, comm)
    step = make_step(model, optimizer)
    for number in range(STEPS):
        step(batch(1000 * comm.rank + number)[0])
    return model


def plain(model: nn.Module, optimizer: Any) -> Step:
    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        backward(model, inputs)
        optimizer.step()

    return step


def compiled_as_a_whole(model: nn.Module, optimizer: Any, backend: str = "eager", **options: Any) -> Step:
    return torch.compile(plain(model, optimizer), backend=backend, **options)


def compiled_in_parts(model: nn.Module, optimizer: Any) -> Step:
    first, last = (torch.compile(one, backend="eager") for one in (backward, optimizer.step))

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        first(model, inputs)
        last()

    return step


def by_compiled_autograd(model: nn.Module, optimizer: Any) -> Step:
    graph_compiler = partial(torch.compile, backend="aot_eager")

    def step(inputs: Tensor) -> None:
        optimizer.zero_grad()
        with compiled_autograd._enable(graph_compiler):
            backward(model, inputs)
        optimizer.step()

    return step


def accumulating(model: nn.Module, optimizer: Any) -> Step:
    def step(inputs: Tensor) -> None:
        with optimizer.no_sync():
            backward(model, inputs[:8])
        backward(model, inputs[8:])
        optimizer.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    ("form", "make_step"), [*((form, compiled_as_a_whole) for form in FORMS), ("updates", compiled_in_parts)]
)
def test_a_compiled_step_trains_the_same_model(form: str, make_step: Any, comm: Communicator) -> None:
    models = [train(comm, one, FORMS[form]) for one in (plain, make_step)]
    assert torch.equal(*map(parameters_of, models))
    if "local" not in form:
        assert same_on_all_ranks(models[1], comm)


def test_hooks_run_as_they_are_in_a_compiled_backward(comm: Communicator) -> None:
    models = [train(comm, one, _overlapping) for one in (plain, by_compiled_autograd)]
    assert torch.equal(*map(parameters_of, models))
    assert same_on_all_ranks(models[1], comm)


def test_gradients_are_accumulated_and_averaged_in_a_compiled_step(comm: Communicator) -> None:
    compiled = partial(torch.compile, backend="aot_eager")
    steps = accumulating, lambda model, optimizer: compiled(accumulating(model, optimizer))
    models = [train(comm, one, _gradients) for one in steps]
    torch.testing.assert_close(*map(parameters_of, models))
    assert same_on_all_ranks(models[1], comm)


def test_compilers_that_change_the_order_of_gradients_leave_the_ranks_one_model(comm: Communicator) -> None:
    assert same_on_all_ranks(train(comm, partial(compiled_as_a_whole, backend="aot_eager"), _overlapping), comm)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
@pytest.mark.timeout(300)
def test_inductor_trains_the_same_model_to_rounding(comm: Communicator) -> None:
    def in_full_precision(model: nn.Module, comm: Communicator) -> Any:  # whose signs no rounding turns
        return wrap(model, Marsit(1), comm, overlap=True)

    with inductor_config.patch(cpp_cache_precompile_headers=False):
        steps = plain, partial(compiled_as_a_whole, backend="inductor")
        models = [train(comm, one, in_full_precision) for one in steps]
    torch.testing.assert_close(*map(parameters_of, models))
    assert same_on_all_ranks(models[1], comm)


def test_a_graph_of_everything_is_refused_with_the_cure(comm: Communicator) -> None:
    with pytest.raises(Unsupported, match=r"it communicates.*leave this call outside, or compile without fullgraph"):
        train(comm, partial(compiled_as_a_whole, fullgraph=True), _overlapping)
    assert same_on_all_ranks(train(comm, plain, _overlapping), comm)


def test_calls_without_an_optimizer_run_as_they_are_in_compiled_functions(comm: Communicator) -> None:
    module, x = nn.BatchNorm1d(3), torch.arange(1000.0) * (comm.rank + 1)
    aggregator = DoubleSqueeze().start(comm, 1000)

    def calls() -> list[Tensor]:
        average_buffers(module, comm)
        total = comm.allreduce(x * 2) + 1
        mean = comm.iallreduce(x * 2, op="mean").wait() + 1
        bits = aggregator.aggregate(x * 2) + aggregator.begin(x * 2).wait()
        comm.barrier()
        return [total, mean, bits, torch.from_numpy(comm.allgather((x[:2] * 2).numpy())) + 1]

    expected = calls()
    aggregator = DoubleSqueeze().start(comm, 1000)
    for one, other in zip(torch.compile(calls, backend="eager")(), expected, strict=True):
        assert torch.equal(one, other)
