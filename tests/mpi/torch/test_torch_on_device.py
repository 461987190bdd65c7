"""Models on a device are trained to the bits of models on the CPU; ranks' models are on one kind of device."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collectives import CollectiveMismatch, Communicator, NonFiniteGradient
from mpicomp import QSGD, Dense, DoubleSqueeze, Marsit, TopKSGD
from mpicomp.torch import (
    DistributedOptimizer,
    OneBitAdam,
    average_buffers,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from mpicomp.torch.buckets import bucket_reducer
from tests.fake_device import FakeStream, KernelEvent
from tests.fake_streams import StreamsDevice
from tests.fake_torch import GPU_IN_ITS_PLACE, NAME, FakeTorchDevice, gpu, reachable
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, wrap

pytestmark = [up_to_two_ranks, pytest.mark.gpu]


@pytest.fixture
def device() -> Iterator[FakeTorchDevice]:
    """Let the device be reached."""
    with reachable() as one:
        yield one


@pytest.fixture(autouse=True)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the name of the fake device, or of a GPU to tests that name the fixture."""
    with gpu() if "where" in inspect.signature(request.function).parameters else reachable():
        yield "cuda" if GPU_IN_ITS_PLACE else NAME


def made(where: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_model(dtype=dtype).to(where)


def step(model: nn.Module, optimizer: Any, comm: Communicator, number: int, where: str, spoil: bool = False) -> None:
    inputs, labels = batch(1000 * comm.rank + number, next(model.parameters()).dtype)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs.to(where)).float(), labels.to(where))
    (loss * float("nan") if spoil else loss).backward()
    optimizer.step()


def trained(comm: Communicator, where: str, algorithm: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Train, go on from a state in a new model, and return the parameters on the CPU."""
    model = made(where, dtype)
    optimizer = wrap(model, algorithm, comm, **options)
    for number in range(3):
        step(model, optimizer, comm, number, where)
    state, weights = optimizer.state_dict(), {key: one.clone() for key, one in model.state_dict().items()}
    model = made(where, dtype)
    model.load_state_dict(weights)
    optimizer = wrap(model, algorithm, comm, **options)
    optimizer.load_state_dict(state)
    for number in range(3, 5):
        step(model, optimizer, comm, number, where)
    return parameters_of(model).cpu()


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (Dense(), {}),
        (Dense(), {"overlap": False, "dtype": torch.bfloat16}),
        (QSGD(), {"backward_passes_per_step": 1}),
        (Marsit(2), {"synchronize": "gradients"}),
        (Marsit(2), {}),
        (Marsit(2), {"overlap": True}),
        (Marsit(2, nonfinite="skip"), {"local_steps": 2, "dtype": torch.bfloat16}),
        ({"*.bias": Dense(), "*": Marsit(None)}, {"synchronize": "gradients"}),
    ],
)
def test_a_model_on_a_device_is_trained_to_the_same_bits(comm: Communicator, algorithm: Any, options: Any) -> None:
    assert torch.equal(trained(comm, NAME, algorithm, **options), trained(comm, "cpu", algorithm, **options))


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (Marsit(2), {"overlap": True}),
        (Marsit(2, residual="paper"), {"synchronize": "gradients", "dtype": torch.bfloat16}),
        (DoubleSqueeze(), {}),
        (TopKSGD(), {"overlap": False}),
        (Dense(wire="float16"), {"overlap": True}),
        (Dense(wire="bfloat16"), {"dtype": torch.bfloat16}),
    ],
)
def test_encoding_on_the_device_changes_no_bit(
    comm: Communicator, algorithm: Any, options: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = trained(comm, where, algorithm, **options)
    monkeypatch.setattr(bucket_reducer, "encoding_device", lambda *about: "cpu")
    assert torch.equal(trained(comm, where, algorithm, **options), there)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (Marsit(2), {"overlap": True}),
        (Marsit(2), {"synchronize": "gradients", "overlap": False}),
        (Dense(), {"overlap": True, "dtype": torch.bfloat16}),
    ],
)
def test_streams_wait_for_means_in_the_host_s_place(
    comm: Communicator, algorithm: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = trained(comm, NAME, algorithm, **options)
    blocked: list[Any] = []
    block = KernelEvent.block
    monkeypatch.setattr(KernelEvent, "block", lambda event, stream: (blocked.append(event), block(event, stream)))
    # PyTorch computes on fake tensors at once, so the stream does at once what it waits for
    monkeypatch.setattr(
        bucket_reducer, "current_stream", lambda tensor: None if tensor.is_cpu else FakeStream(eager=True)
    )
    assert torch.equal(trained(comm, NAME, algorithm, **options), waited)
    # whether a rank's messages or its kernels end first is chance; one rank's own values are their mean
    assert any(comm.allgather_object(bool(blocked))) != (comm.size == 1 and algorithm == Dense())


@pytest.mark.communicator(parting=True)  # with overlap, a rank may have begun more calls, and gives the communicator up
@pytest.mark.parametrize("overlap", [False, True])
def test_a_captured_stream_on_one_rank_is_an_error_on_all(comm: Communicator, overlap: bool) -> None:
    model = made(NAME)
    optimizer = wrap(model, QSGD(), comm, synchronize="gradients", overlap=overlap)
    step(model, optimizer, comm, 0, NAME)
    mine = comm.rank == comm.size - 1
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            device = StreamsDevice()
            device.torch.is_capturing = True
            patch.setattr(FakeTorchDevice, "take", lambda _, array: device.take(array))
            patch.setattr(FakeTorchDevice, "follow", lambda _: device.follow())
        with pytest.raises(ValueError if mine else CollectiveMismatch, match="a CUDA graph is being captured"):
            step(model, optimizer, comm, 1, NAME)


def test_buckets_of_a_device_begin_during_backward(comm: Communicator, device: FakeTorchDevice) -> None:
    model = made(NAME)
    optimizer = wrap(model, QSGD(), comm)
    step(model, optimizer, comm, 0, NAME)
    inputs, labels = batch(1)
    nn.functional.cross_entropy(model(inputs.to(NAME)), labels.to(NAME)).backward()
    assert optimizer._synchronizer._early.queue.n_started == len(optimizer.aggregators) - 1
    optimizer.step()


def test_vectors_are_encoded_on_the_device_where_the_method_can_and_cross_as_signs(
    comm: Communicator, device: FakeTorchDevice
) -> None:
    model = made(NAME)
    optimizer = wrap(model, Marsit(None), comm, synchronize="gradients")
    for number in range(2):
        device.copied.clear()
        step(model, optimizer, comm, number, NAME)
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert 0 < sum(device.copied) < dense


def test_one_bit_adam_on_a_device_makes_the_same_steps(comm: Communicator) -> None:
    def run(where: str) -> Any:
        model = made(where)
        optimizer = OneBitAdam(model.parameters(), lr=0.01, weight_decay=0.1, warmup_steps=2, comm=comm)
        for number in range(4):
            step(model, optimizer, comm, number, where)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        step(model, optimizer, comm, 4, where)
        return parameters_of(model).cpu()

    assert torch.equal(run(NAME), run("cpu"))


def test_a_state_is_loaded_from_whichever_device_it_was_read_to(comm: Communicator) -> None:
    model = made(NAME)
    optimizer = wrap(model, Marsit(None), comm, synchronize="gradients")
    for number in range(2):
        step(model, optimizer, comm, number, NAME)
    state = optimizer.state_dict()
    own = state["mpicomp"]
    own["aggregators"] = [
        {key: one.to(NAME) if torch.is_tensor(one) else one for key, one in part.items()} for part in own["aggregators"]
    ]
    before = [aggregator.state_dict()["residual"] for aggregator in optimizer.aggregators]
    optimizer.load_state_dict(state)
    for aggregator, residual in zip(optimizer.aggregators, before, strict=True):
        np.testing.assert_array_equal(aggregator.state_dict()["residual"], residual)


def test_a_state_of_a_model_on_a_device_is_saved_as_tensors_of_the_host(comm: Communicator) -> None:
    model = made(NAME)
    optimizer = wrap(model, Marsit(None), comm, synchronize="gradients")
    step(model, optimizer, comm, 0, NAME)
    file = io.BytesIO()
    torch.save(optimizer.state_dict()["mpicomp"], file)
    file.seek(0)
    torch.load(file, weights_only=True)


@pytest.mark.mpi(min_size=2)
def test_models_on_different_kinds_of_devices_are_refused_on_all_ranks(comm: Communicator) -> None:
    model = made(NAME if comm.rank == 0 else "cpu")
    with pytest.raises(CollectiveMismatch, match=rf"tensors on {NAME} of .*tensors on cpu of|on cpu of .*on {NAME} of"):
        wrap(model, Dense(), comm)


def test_parameters_reach_models_on_other_devices(comm: Communicator) -> None:
    model = make_model(seed=comm.rank)
    model = model.to(NAME) if comm.rank == comm.size - 1 else model
    broadcast_parameters(model, comm, root=comm.size - 1)
    assert torch.equal(parameters_of(model).cpu(), parameters_of(make_model(seed=comm.size - 1)))


def test_an_optimizers_state_reaches_models_on_other_devices(comm: Communicator) -> None:
    root = comm.size - 1
    model = made(NAME if comm.rank == root else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if comm.rank == root:
        step(model, optimizer, comm, 0, NAME)
    broadcast_optimizer_state(optimizer, comm, root)
    moments = [one["momentum_buffer"] for one in optimizer.state.values()]
    assert {one.device for one in moments} == {next(model.parameters()).device}
    total = torch.stack([one.double().sum().cpu() for one in moments]).sum()
    np.testing.assert_array_equal(comm.allreduce(float(total)), comm.size * float(total))


def test_buffers_on_a_device_are_averaged(comm: Communicator) -> None:
    model = nn.BatchNorm1d(3).to(NAME)
    model.running_mean.fill_(float(comm.rank))
    average_buffers(model, comm)
    assert model.running_mean.cpu().tolist() == [(comm.size - 1) / 2] * 3


@pytest.mark.parametrize("algorithm", [Dense(), Marsit(None)])
def test_nan_on_a_device_is_told_with_ranks_and_parameters_and_training_goes_on(
    comm: Communicator, algorithm: Any
) -> None:
    def run(where: str) -> Any:
        model, bad = made(where), comm.size - 1
        optimizer = wrap(model, algorithm, comm, synchronize="gradients")
        step(model, optimizer, comm, 0, where)
        named = r"2\.weight" if comm.rank == bad else ""
        with pytest.raises(NonFiniteGradient, match=rf"rank {bad}.*{named}"):
            step(model, optimizer, comm, 1, where, spoil=comm.rank == bad)
        return parameters_of(model).cpu()

    assert torch.equal(run(NAME), run("cpu"))


def test_a_scaler_skips_the_step_on_all_ranks(comm: Communicator) -> None:
    model = made(NAME)
    optimizer = wrap(model, Dense(), comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(3):
        before = parameters_of(model).cpu()
        inputs, labels = batch(number)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs.to(NAME)), labels.to(NAME))
        if number == 1 and comm.rank == comm.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, parameters_of(model).cpu()) == (number == 1)
    assert scaler.get_scale() == 2.0


def test_a_parameter_on_a_device_that_cannot_be_reached_is_refused(comm: Communicator) -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"'weight' lives on meta, which cannot be reached .* move it to the CPU or"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), Dense(), comm, model.named_parameters())


def test_views_of_a_bucket_on_a_device_are_made_once(
    comm: Communicator, device: FakeTorchDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(NAME)
    optimizer = wrap(model, Marsit(None), comm, synchronize="gradients", overlap=True)
    for number in range(2):
        step(model, optimizer, comm, number, NAME)
    followed: list[str] = []
    monkeypatch.setattr(device, "follow", lambda: followed.append("follow"))
    monkeypatch.setattr(device, "take", lambda array: pytest.fail("a bucket is viewed again"))
    step(model, optimizer, comm, 2, NAME)
    assert followed == ["follow"] * len(optimizer.buckets)
