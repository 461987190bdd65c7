"""OneBitAdam against torch's Adam and a simulation of all ranks, and the effects of freezing v."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from apps.train.data import load
from collectives import Communicator
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer, OneBitAdam, broadcast_parameters
from mpicomp.torch.one_bit_adam.momentum_optimizer import codec_of_bits
from tests.mpi.lanes import alone_too, few_ranks, two_ranks
from tests.mpi.torch.training import make_model, same_on_all_ranks, train
from tests.reference.one_process.one_bit_adam import OneBitAdamOneProcess

pytestmark = [few_ranks, alone_too]

LENGTHS = (5, 70, 300, 64, 1)
OPTIONS = ({"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.003, "betas": (0.8, 0.95), "eps": 1e-4})


def random_vector(*seed: int, n: int = sum(LENGTHS)) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(n).astype(np.float32))


def model_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Tensors of `LENGTHS`."""
    return [nn.Parameter(part.to(dtype)) for part in random_vector(1000).split(LENGTHS)]


def set_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = part.to(parameter.dtype).clone()


def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """The first two and the others, whose border lies within a bucket of 1 kB."""
    return [{"params": parameters[:2], **OPTIONS[0]}, {"params": parameters[2:], **OPTIONS[1]}]


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_first_steps_are_adams_on_the_mean_gradient(comm: Communicator, decoupled: bool) -> None:
    ours, alone = model_of(), model_of()
    optimizer = OneBitAdam(
        in_groups(ours), decoupled_weight_decay=decoupled, warmup_steps=10, comm=comm, bucket_mb=0.001
    )
    adam = torch.optim.Adam(in_groups(alone), decoupled_weight_decay=decoupled, foreach=True)
    exact = DistributedOptimizer(adam, Dense(), comm, bucket_mb=0.001)
    for step in range(6):
        gradient = (64 * random_vector(comm.rank, step)).round() / 64  # so that sums are exact, in any order
        for one in (ours, alone):
            set_gradients(one, gradient)
        optimizer.step()
        exact.step()
    for own, expected in zip(ours, alone, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize(
    ("bits", "preconditioned", "decoupled"),
    [*((1, one, other) for one in (False, True) for other in (False, True)), (2, False, True), (3, True, False),
     (8, False, False)],
)  # fmt: skip
def test_every_step_is_that_of_a_simulation_of_all_ranks(
    comm: Communicator, bits: int, preconditioned: bool, decoupled: bool
) -> None:
    # torch fuses multiplying and adding, NumPy does not: in float64 the difference tips no sign and no level over
    n, group = 700, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
    group["decoupled_weight_decay"] = decoupled
    start = random_vector(1000, n=n).double()
    parts = [nn.Parameter(part.clone()) for part in start.split([400, 300])]
    options = {"bits": bits, "warmup_steps": 3, "preconditioned": preconditioned}
    optimizer = OneBitAdam(parts, **group, **options, comm=comm, bucket_mb=0.001)
    references = [
        OneBitAdamOneProcess(x.numpy().copy(), comm.size, codec_of_bits(bits), k, 3, preconditioned, group)
        for k, x in enumerate(start.split([400, 300]))
    ]
    assert len(optimizer.aggregators) == len(references)
    for step in range(9):
        gradients = [random_vector(rank, step, n=n).double() for rank in range(comm.size)]
        for gradient in gradients:
            gradient[10:20] = 0
            gradient[650] = 0 if step < 3 else 5  # v is frozen as 0 there
        set_gradients(parts, gradients[comm.rank])
        optimizer.step()
        for k, reference in enumerate(references):
            reference.step([gradient.split([400, 300])[k].numpy() for gradient in gradients])
            np.testing.assert_allclose(parts[k].detach().numpy(), reference.x, rtol=1e-11, atol=1e-12)
    assert optimizer.frozen
    assert optimizer.masked == (0 if not decoupled else 11)


def test_steps_are_as_long_after_the_freeze_as_before(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(2000))
    optimizer = OneBitAdam([parameter], lr=0.01, warmup_steps=20, comm=comm)
    lengths = []
    for step in range(24):
        before = parameter.detach().clone()
        parameter.grad = 1 + 0.1 * random_vector(comm.rank, step, n=2000)
        optimizer.step()
        lengths.append(float((parameter.detach() - before).norm()) / 2000**0.5)
    assert optimizer.frozen
    # v without its bias correction, 0.02 times as large, would make steps of 0.07
    np.testing.assert_allclose(lengths, 0.01, rtol=0.1)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_elements_without_gradients_before_the_freeze_stay(comm: Communicator, preconditioned: bool) -> None:
    parameter = nn.Parameter(random_vector(1, n=300))
    optimizer = OneBitAdam([parameter], warmup_steps=2, preconditioned=preconditioned, comm=comm)
    before = parameter.detach().clone()
    for step in range(6):
        gradient = random_vector(comm.rank, step, n=300)
        gradient[50:90] = 0 if step < 4 else 1
        parameter.grad = gradient
        optimizer.step()
    moved = parameter.detach() != before
    assert not moved[50:90].any()
    assert moved[:50].all()
    assert moved[90:].all()
    assert optimizer.masked == 40


def test_a_missing_gradient_counts_as_zeros(comm: Communicator) -> None:
    models = [model_of(), model_of()]
    optimizers = [OneBitAdam(one, warmup_steps=2, comm=comm, seed=seed) for seed, one in enumerate(models)]
    for step in range(5):
        for parameters in models:
            set_gradients(parameters, random_vector(comm.rank, step))
        if comm.rank == 0 and step:
            models[0][2].grad = None
            models[1][2].grad = torch.zeros_like(models[1][2])
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(*models, strict=True))


def test_v_is_frozen_by_itself_once_it_is_stable(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(500))
    optimizer = OneBitAdam([parameter], betas=(0.5, 0.8), comm=comm)
    frozen_at = None
    for step in range(60):
        parameter.grad = random_vector(comm.rank, step, n=500) * max(0.1, 0.9**step)
        optimizer.step()
        if optimizer.frozen and frozen_at is None:
            frozen_at = step
    # the gradients fall until step 22; v forgets within 5
    assert frozen_at is not None
    assert 22 < frozen_at < 45


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_move_as_float32_masters(comm: Communicator, dtype: torch.dtype) -> None:
    model, wide = model_of(dtype), model_of(dtype)
    wide = [nn.Parameter(one.detach().float()) for one in wide]
    optimizers = [OneBitAdam(one, lr=1e-4, warmup_steps=3, comm=comm) for one in (model, wide)]
    for step in range(8):
        gradient = random_vector(comm.rank, step).to(dtype)
        for parameters, optimizer in zip((model, wide), optimizers, strict=True):
            set_gradients(parameters, gradient)
            optimizer.step()
    assert all(torch.equal(one, other.to(dtype)) for one, other in zip(model, wide, strict=True))
    optimizers[0].zero_grad()
    assert all(parameter.grad is None for parameter in model)


def test_a_closure_and_a_scheduler_work_as_with_any_optimizer(comm: Communicator) -> None:
    model = make_model()
    optimizer = OneBitAdam(model.parameters(), lr=0.1, warmup_steps=2, comm=comm)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    hooked: list[int] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))

    def closure() -> float:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.ones(2, 10)), torch.tensor([0, 1])).backward()
        return 3.0 + comm.rank

    for _ in range(4):
        assert optimizer.step(closure) == 3.0 + comm.rank
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16
    assert len(hooked) == optimizer.steps == optimizer.synchronizations == 4
    assert same_on_all_ranks(model, comm)


def test_ranks_stay_equal_and_send_bits(comm: Communicator) -> None:
    model = make_model()
    optimizer = OneBitAdam(model.parameters(), warmup_steps=4, comm=comm)
    train(model, optimizer, comm, range(4))
    (dense,) = (aggregator.traffic.last.bytes_sent for aggregator in optimizer.aggregators)
    train(model, optimizer, comm, range(4, 10))
    assert same_on_all_ranks(model, comm)
    (one,) = optimizer.aggregators
    assert one.traffic.total.messages >= 6 * one.traffic.last.messages > 0 or comm.size == 1
    assert one.traffic.last.bytes_sent < dense or comm.size == 1


@two_ranks
@pytest.mark.parametrize(
    ("codec", "lr"), [({"bits": 1}, 0.01), ({"bits": 4}, 0.001), ({"compressor": "levels:levels=4,bucket=128"}, 0.01)]
)
def test_learns_the_digits_as_dense_adam_does(comm: Communicator, codec: dict[str, Any], lr: float) -> None:
    digits = load("digits").train
    losses = []
    for one_bit in (False, True):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1, generator=generator)
        broadcast_parameters(model, comm)
        if one_bit:
            optimizer: Any = OneBitAdam(model.parameters(), lr=lr, **codec, warmup_steps=60, comm=comm)
        else:
            optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=lr), Dense(), comm)
        order = torch.randperm(len(digits.labels), generator=torch.Generator().manual_seed(comm.rank))
        for step in range(300):
            chosen = order.roll(-32 * step)[:32]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(digits.images[chosen]), digits.labels[chosen]).backward()
            optimizer.step()
        losses.append(nn.functional.cross_entropy(model(digits.images), digits.labels).item())
        assert same_on_all_ranks(model, comm)
    dense, compressed = losses
    assert dense < 0.5
    assert compressed < 1.2 * dense + 0.02
