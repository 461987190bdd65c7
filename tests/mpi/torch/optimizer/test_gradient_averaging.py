"""DistributedOptimizer under "gradients"."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, OneBitSGD
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import alone_too
from tests.mpi.torch.training import batch, has_grad_dtype, make_model, parameters_of, train, wrap, wrapped

pytestmark = alone_too


def mean_gradient(alone: nn.Module, comm: Communicator, step: int) -> None:
    """Let one process have the gradient of all ranks' batches."""
    alone.zero_grad()
    for rank in range(comm.size):
        inputs, labels = batch(1000 * rank + step)
        (nn.functional.cross_entropy(alone(inputs), labels) / comm.size).backward()


def test_trains_like_one_process_on_all_the_data(comm: Communicator) -> None:
    model, alone = make_model(), make_model()
    train(model, wrap(model, Dense(), comm), comm, range(5))
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    for step in range(5):
        mean_gradient(alone, comm, step)
        optimizer.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(alone))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_averages_gradients_of_every_float_type(comm: Communicator, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 2).to(dtype)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), Dense(), comm, synchronize="gradients"
    )
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(comm.rank))
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, (comm.size - 1) / 2))


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_rounded_to_16_bits_by_one_rank_as_by_several(overlap: bool, comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = DistributedOptimizer(sgd, Dense(wire="float16"), comm, overlap=overlap)
    (parameter * torch.tensor([1 + 2.0**-12, 1e-9, 1 / 3])).sum().backward()
    optimizer.step()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1, 0, torch.tensor(1 / 3).half().item()]


def test_no_padding_between_tensors_enters_scales_that_know_no_tensors(comm: Communicator) -> None:
    parameters = [nn.Parameter(torch.zeros(length)) for length in (5, 70, 1)]
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), OneBitSGD(), comm, synchronize="gradients")
    gradient = torch.randn(76, generator=torch.Generator().manual_seed(comm.rank)) + 3
    for parameter, part in zip(parameters, gradient.split([5, 70, 1]), strict=True):
        parameter.grad = part.clone()
    optimizer.step()
    expected = OneBitSGD().start(comm, 76).aggregate(gradient)
    assert torch.equal(torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None]), expected)


def test_a_missing_gradient_counts_as_zeros(comm: Communicator) -> None:
    used, unused = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    optimizer = DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), Dense(), comm, synchronize="gradients")
    used.grad = torch.ones(5)
    if comm.rank == 0:
        unused.grad = torch.ones(5)
    optimizer.step()
    torch.testing.assert_close(used.detach(), torch.full((5,), -1.0))
    torch.testing.assert_close(unused.detach(), torch.full((5,), -1.0 / comm.size))


def test_a_gradient_may_have_any_strides(comm: Communicator) -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), Dense(), comm, synchronize="gradients")
    gradient = torch.arange(12.0).reshape(4, 3).t()
    assert not gradient.is_contiguous()
    parameter.grad = gradient.clone(memory_format=torch.preserve_format)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), -gradient)


@pytest.mark.communicator(parting=True)
def test_a_sparse_gradient_is_refused_by_name_and_no_rank_waits(comm: Communicator) -> None:
    model = nn.Sequential(nn.Embedding(7, 3, sparse=comm.rank == 0))
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer = wrap(model, Dense(), comm)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((ValueError, CollectiveMismatch), match=r"rank 0.*'0\.weight' is sparse"):
        optimizer.step()


def test_a_gradient_that_is_not_finite_names_rank_and_parameter(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, overlap=False)
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == comm.size - 1:
        next(model[2].parameters()).grad[0, 0] = float("nan")
    with pytest.raises(NonFiniteGradient) as caught:
        optimizer.step()
    assert caught.value.ranks == (comm.size - 1,)
    assert ("'2.weight'" in str(caught.value)) == (comm.rank == comm.size - 1)


def test_synchronize_averages_so_that_the_mean_can_be_clipped(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    inputs, labels = batch(1000 * comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.synchronize()
    optimizer.synchronize()  # no more to do
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
    optimizer.step()
    assert optimizer.synchronizations == 1

    alone = make_model()
    plain = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    mean_gradient(alone, comm, 0)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), max_norm=0.01))
    plain.step()
    torch.testing.assert_close(parameters_of(model), parameters_of(alone))


@pytest.mark.parametrize("forget", ["never synchronized", "step", "zero_grad", "closure"])
def test_synchronize_stands_for_the_averaging_of_the_next_step_only(comm: Communicator, forget: str) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), Dense(), comm, synchronize="gradients")
    parameter.grad = torch.zeros(2)
    if forget != "never synchronized":
        optimizer.synchronize()
    if forget == "step":
        optimizer.step()
    elif forget == "zero_grad":
        optimizer.zero_grad()

    def closure() -> float:
        parameter.grad = torch.full((2,), float(comm.rank))
        return 10.0 + comm.rank

    if forget in ("never synchronized", "closure"):  # it is evaluated before its gradients are averaged
        assert optimizer.step(closure) == 10.0 + comm.rank
    else:
        closure()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2,), -(comm.size - 1) / 2))


@has_grad_dtype
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("own", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_gradients_of_another_type_on_one_rank_are_refused_at_wrapping_on_all(
    own: torch.dtype, other: torch.dtype, overlap: bool, comm: Communicator
) -> None:
    model = make_model(dtype=own)
    is_last = comm.rank == comm.size - 1
    if is_last:
        model[0].weight.grad_dtype = other
    with pytest.raises(
        ValueError if is_last else CollectiveMismatch,
        match=rf"parameter '0.weight' is of {own} and its gradient of {other}; .* synchronize=\"updates\"",
    ):
        wrap(model, Dense(), comm, synchronize="gradients", overlap=overlap)


@has_grad_dtype
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_whose_type_changes_later_are_refused_on_all_ranks_and_no_rank_makes_the_step(
    overlap: bool, comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm, synchronize="gradients", overlap=overlap)
    train(model, optimizer, comm, range(3))
    before = parameters_of(model)
    optimizer.zero_grad()
    is_last = comm.rank == comm.size - 1
    for one in model.parameters():
        one.grad_dtype = torch.float64 if is_last else one.dtype
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with pytest.raises(
        ValueError if is_last else CollectiveMismatch, match=r"is of torch.float32 and its gradient of torch.float64"
    ):
        optimizer.step()
    assert torch.equal(parameters_of(model), before)


@has_grad_dtype
def test_local_updates_take_gradients_in_float32_of_16_bit_parameters(comm: Communicator) -> None:
    model, plain = nn.Linear(4, 3).bfloat16(), nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    wide = torch.full((3, 4), 1 + 2.0**-12)
    model.weight.grad_dtype = torch.float32
    options = {"synchronize": "updates", "local_steps": 3}
    for one, grad in ((model, wide), (plain, wide)):
        with torch.no_grad():
            one.weight.zero_()
        optimizer = DistributedOptimizer(torch.optim.SGD([one.weight], lr=1.0), Dense(), comm, **options)
        one.weight.grad = grad.clone()
        optimizer.step()
        held = optimizer.param_groups[0]["params"][0]
        assert torch.equal(held.detach(), -wide)
