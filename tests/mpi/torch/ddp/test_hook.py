"""The communication hook for DistributedDataParallel: its averages, and the steps from which it takes part."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.errors import NonFiniteGradient
from mpicomp import Auto, Dense, DoubleSqueeze, EFSignSGD, Marsit, PowerSGD, Relay, ScaleCom
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer, ddp_hook, redistribute_states
from tests.mpi.lanes import alone_too, few_ranks, three_ranks
from tests.mpi.torch.ddp.hooked_models import SMALL_BUCKETS, VIEWS, hooked, process_group, sgd
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train

pytestmark = [few_ranks, alone_too]
FORMS: dict[str, Any] = {
    "dense": Dense(),
    "dense, 16 bits": Dense(wire="float16"),
    "marsit": Marsit(3),
    "scalecom": ScaleCom(rate=8),
    "power-sgd": PowerSGD(1, start_step=1),
    "doublesqueeze": DoubleSqueeze(),
    "relay": Relay(),
    "auto": Auto(DoubleSqueeze(), trial_steps=25),  # on trial, so that nothing depends on time
}


@pytest.fixture(autouse=True)
def group(mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    """Provide DDP's process group."""
    with process_group(mpi_comm, folder):
        yield


class Heads(nn.Module):
    """Two heads behind a common layer, a third one that is never used, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.empty = nn.Parameter(torch.empty(0))
        self.common = nn.Linear(10, 20)
        self.heads = nn.ModuleList(nn.Linear(20, 3) for _ in range(3))

    def forward(self, inputs: Tensor, chosen: list[int]) -> Tensor:
        x = self.common(inputs).relu() + self.empty.sum()
        return torch.stack([self.heads[k](x) for k in chosen]).sum(0)


@three_ranks
@pytest.mark.parametrize(
    ("form", "options", "dtype"),
    [(form, options, torch.float32) for form in FORMS for options in ({}, VIEWS)]
    + [("dense", VIEWS, torch.float16), ("doublesqueeze", {}, torch.bfloat16)],
)
def test_the_hook_equals_distributed_optimizer_bit_for_bit(
    form: str, options: dict[str, Any], dtype: torch.dtype, comm: Communicator
) -> None:
    model, state = hooked(make_model(dtype=dtype), FORMS[form], comm, **options)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(1))  # in full precision: DDP has not grouped its buckets again
    assert not state.aggregators
    other = make_model(dtype=dtype)
    other.load_state_dict(model.module.state_dict())
    inner = sgd(other)
    inner.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    expected = DistributedOptimizer(inner, FORMS[form], comm, other.named_parameters(), synchronize="gradients")
    train(model, optimizer, comm, range(1, 8))
    train(other, expected, comm, range(1, 8))
    assert state.buckets == expected.buckets
    assert len(state.buckets) == 1
    assert torch.equal(parameters_of(model), parameters_of(other))
    assert same_on_all_ranks(model, comm)


def two_losses(model: nn.Module, step: int, comm: Communicator, chosen: list[int]) -> Iterator[Tensor]:
    for k in range(2):
        inputs, labels = batch(1000 * comm.rank + 10 * step + k)
        yield nn.functional.cross_entropy(model(inputs, chosen), labels)


@pytest.mark.parametrize("small", [{}, SMALL_BUCKETS], ids=["one bucket", "several"])
@pytest.mark.parametrize("views", [{}, VIEWS], ids=["copies", "views"])
@pytest.mark.parametrize("graph", ["static_graph", "find_unused_parameters"])
def test_gradients_are_those_of_ddp_without_a_hook_with_unused_parameters_and_no_sync(
    graph: str, views: dict[str, Any], small: dict[str, Any], comm: Communicator
) -> None:
    options = {**views, **small, graph: True}
    plain = DistributedDataParallel(Heads(), **options)
    model, state = hooked(Heads(), Dense(), comm, **options)
    for step in range(6):
        # with find_unused_parameters each rank may use another head
        chosen = [0, 1] if graph == "static_graph" else [(step + comm.rank) % 2]
        for one in model, plain:
            one.zero_grad(set_to_none=not views)
            first, second = two_losses(one, step, comm, chosen), two_losses(one, step, comm, chosen)
            if graph != "static_graph":  # whose first backward has to synchronize
                with one.no_sync():
                    next(first).backward()
            next(second).backward()
        for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            if "heads.2" in name:
                assert expected.grad is None or not expected.grad.any()
                assert parameter.grad is None or not parameter.grad.any()
            else:
                torch.testing.assert_close(parameter.grad, expected.grad)
    assert len(state.aggregators) == (1 if not small else len(state.buckets)) > 0
    assert {aggregator.step for aggregator in state.aggregators} == {4}  # after two iterations in full precision


@pytest.mark.parametrize("options", [{}, VIEWS], ids=["copies", "views"])
def test_gradients_may_have_any_order_in_memory(options: dict[str, Any], comm: Communicator) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model, _ = hooked(net, DoubleSqueeze(), comm, **options)
    plain = copy.deepcopy(net)
    for step in range(3):
        for one in model, plain:
            one.zero_grad()
            one(torch.arange(75.0).reshape(1, 3, 5, 5) + step).square().sum().backward()
        for name, expected in plain.named_parameters():  # all ranks have the same gradients
            found = model.module.get_parameter(name).grad
            assert found is not None
            assert found.stride() == expected.stride()
            if step == 0:
                torch.testing.assert_close(found, expected.grad)  # three ranks round in their sum
            else:
                assert (found * expected.grad > 0).all()  # equal signs


def test_the_first_iterations_touch_no_residual(comm: Communicator) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(), comm, **SMALL_BUCKETS)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(1))
    assert state.aggregators == ()
    train(model, optimizer, comm, range(1, 4))
    assert sorted(name for names in state.buckets for name in names) == sorted(
        name for name, _ in model.module.named_parameters()
    )
    assert len(state.buckets) > 1
    assert {aggregator.step for aggregator in state.aggregators} == {4 - 1}
    assert same_on_all_ranks(model, comm)


def test_parameters_of_several_algorithms_in_a_bucket_have_vectors_of_their_own(comm: Communicator) -> None:
    choice = {"*.bias": Dense(), "*": Marsit(5)}
    model, state = hooked(make_model(), choice, comm)
    train(model, sgd(model), comm, range(5))
    methods = [type(aggregator.algorithm) for aggregator in state.aggregators]
    assert dict(zip(methods, state.buckets, strict=True)) == {
        Dense: ["2.bias", "0.bias"],
        Marsit: ["2.weight", "0.weight"],
    }
    assert same_on_all_ranks(model, comm)
    by_function, _ = hooked(make_model(), lambda name, p: Dense() if p.ndim == 1 else Marsit(5), comm)
    train(by_function, sgd(by_function), comm, range(5))
    assert torch.equal(parameters_of(by_function), parameters_of(model))


def test_the_model_is_needed_for_names_alone(comm: Communicator) -> None:
    named, _ = hooked(make_model(), Marsit(3), comm)
    train(named, sgd(named), comm, range(6))
    model = DistributedDataParallel(make_model())
    state, hook = ddp_hook(Marsit(3), comm)
    model.register_comm_hook(state, hook)
    train(model, sgd(model), comm, range(6))
    assert [sorted(names) for names in state.buckets] == [[f"parameter {k}" for k in range(4)]]
    assert torch.equal(parameters_of(model), parameters_of(named))


def test_the_hook_is_watched(comm: Communicator) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(), comm, **SMALL_BUCKETS)
    optimizer = sgd(model)
    for step in range(6):
        train(model, optimizer, comm, range(step, step + 1))
        found = state.diagnostics(every=1, audit_every=2)
    assert found.audits == 2
    assert found.cosine > 0.1
    assert found.update_norm > 0
    assert found.residual_norm > 0 or comm.size == 1
    assert len({*comm.allgather_object((found.update_norm, found.cosine))}) == 1
    unwatched, _ = hooked(make_model(), DoubleSqueeze(), comm, **SMALL_BUCKETS)
    train(unwatched, sgd(unwatched), comm, range(6))
    assert torch.equal(parameters_of(model), parameters_of(unwatched))


def test_without_threads_in_mpi_hooks_wait_and_the_log_says_so_once(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = [hooked(make_model(), Marsit(3), Communicator(comm.mpi_comm, "ring"), **SMALL_BUCKETS)[0]]
    monkeypatch.setattr("collectives.group.calls.is_supported", lambda comm: False)
    monkeypatch.setattr("mpicomp.torch.buckets.bucket_queue._warned", False)
    with caplog.at_level(logging.WARNING, "mpicomp"):
        models += [hooked(make_model(), Marsit(3), comm, **SMALL_BUCKETS)[0] for _ in range(2)]
    for model in models:
        train(model, sgd(model), comm, range(6))
        assert torch.equal(parameters_of(model), parameters_of(models[0]))
    assert sum("without MPI_THREAD_MULTIPLE" in record.message for record in caplog.records) == (comm.size > 1)


def test_a_state_resumes_to_the_bit_in_another_process(comm: Communicator) -> None:
    choice = {"*.bias": DoubleSqueeze(), "*": Marsit(3)}
    model, state = hooked(make_model(), choice, comm, **SMALL_BUCKETS)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(5))
    file = io.BytesIO()
    torch.save([state.state_dict(), optimizer.state_dict(), model.module.state_dict()], file)
    train(model, optimizer, comm, range(5, 9))
    again = make_model(seed=1)
    file.seek(0)
    saved, inner, values = torch.load(file)  # weights_only
    again.load_state_dict(values)
    resumed, restored = hooked(again, choice, comm, **SMALL_BUCKETS)  # whose buckets are the first ones again
    optimizer = sgd(resumed)
    optimizer.load_state_dict(inner)
    restored.load_state_dict(saved)
    assert restored.buckets == state.buckets
    train(resumed, optimizer, comm, range(5, 9))
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    assert (restored.iterations, state.iterations) == (9, 9)


def test_other_ranks_go_on_from_the_mean_of_the_residuals(comm: Communicator) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(compressor="one-bit"), comm)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(5))
    residual = state.aggregators[0].residual
    assert residual is not None
    pending = sum(comm.mpi_comm.allgather(residual.astype("float64"))) / comm.size
    states = redistribute_states(comm.mpi_comm.allgather(state.state_dict()), comm.size)
    state.load_state_dict(states[comm.rank])
    assert np.allclose(state.aggregators[0].residual, pending)
    train(model, optimizer, comm, range(5, 8))
    assert state.iterations == 8
    assert same_on_all_ranks(model, comm)


def test_a_state_of_the_first_iteration_begins_anew(comm: Communicator) -> None:
    model, state = hooked(make_model(), DoubleSqueeze(), comm)
    optimizer = sgd(model)
    train(model, optimizer, comm, range(1))
    early = state.state_dict()
    train(model, optimizer, comm, range(1, 4))
    state.load_state_dict(copy.deepcopy(early))
    assert state.aggregators == ()
    train(model, optimizer, comm, range(4, 8))
    assert state.aggregators[0].step == 2
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [{}, VIEWS], ids=["copies", "views"])
def test_an_overflow_on_one_rank_skips_the_step_on_all_with_a_gradscaler(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, _ = hooked(make_model(), DoubleSqueeze(), comm, **options, **SMALL_BUCKETS)
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        bad = step in (0, 3)  # in full precision, and compressed
        before = parameters_of(model)
        inputs, labels = batch(1000 * comm.rank + step)
        optimizer.zero_grad()
        loss = scaler.scale(nn.functional.cross_entropy(model(inputs), labels))
        loss = loss * float("inf") if bad and comm.rank == comm.size - 1 else loss
        with pytest.raises(NonFiniteGradient) if bad else nullcontext():
            loss.backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameters_of(model), before) == bad
        assert same_on_all_ranks(model, comm)
    assert set(comm.mpi_comm.allgather(scaler.get_scale())) == {256.0}


@pytest.mark.parametrize("method", [EFSignSGD(), DoubleSqueeze(), PowerSGD(), Marsit(global_step=0.01)], ids=str)
def test_gradients_that_are_unscaled_in_the_hook_give_the_bits_of_training_without_a_scale(
    method: Algorithm, comm: Communicator
) -> None:
    """Otherwise residuals would be of another scale than the gradients, once a GradScaler changes its own."""
    found = []
    for scales in ([1.0] * 6, [65536.0, 65536.0, 65536.0, 16.0, 32.0, 16.0]):
        model = DistributedDataParallel(make_model())
        state, hook = ddp_hook(method, comm, model)

        def unscaled(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses postponed annotations
            bucket.buffer().div_(scale)  # noqa: B023 - of the step
            return hook(state, bucket).then(lambda future: future.value().mul_(scale))  # noqa: B023

        model.register_comm_hook(state, unscaled)
        optimizer = sgd(model)
        for step, scale in enumerate(scales):
            inputs, labels = batch(1000 * comm.rank + step)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(model(inputs), labels) * scale).backward()
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
        found.append(parameters_of(model))
    assert torch.equal(*found)


def test_ranks_that_have_joined_contribute_zeros(comm: Communicator) -> None:
    model, _ = hooked(make_model(), Dense(), comm)
    alone = make_model()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)
    with model.join():
        for step in range(4 + comm.rank):
            inputs, labels = batch(1000 * comm.rank + step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    for step in range(3 + comm.size):
        expected.zero_grad()
        for rank in range(max(0, step - 3), comm.size):
            inputs, labels = batch(1000 * rank + step)
            (nn.functional.cross_entropy(alone(inputs), labels) / comm.size).backward()
        expected.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(alone))
    assert same_on_all_ranks(model, comm)
