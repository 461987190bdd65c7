"""Arguments that DistributedOptimizer takes or refuses, and schedulers, which see the optimizer inside."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import SSDM, Dense, DoubleSqueeze, MajorityVote, Marsit
from mpicomp.torch import DistributedOptimizer, OneBitAdam
from tests.mpi.lanes import up_to_two_ranks
from tests.mpi.torch.training import make_model, parameters_of, train, wrap, wrapped

pytestmark = up_to_two_ranks

META = nn.Linear(2, 2, device="meta")


@pytest.mark.mpi(min_size=2)
def test_a_first_mistake_of_one_rank_is_told_to_all(comm: Communicator) -> None:
    optimizer, odd = torch.optim.SGD(make_model().parameters(), lr=1.0), comm.rank == comm.size - 1
    told = f"rank {comm.size - 1} rejects wrapping an optimizer: .*the algorithm is text"
    with pytest.raises(TypeError if odd else CollectiveMismatch, match="the algorithm is text" if odd else told):
        DistributedOptimizer(optimizer, "marsit" if odd else Marsit(), comm)
    DistributedOptimizer(optimizer, Marsit(), comm)


def test_a_scheduler_drives_the_wrapped_optimizer(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for step in range(5):
        train(model, optimizer, comm, range(step, step + 1))
        scheduler.step()
    assert math.isclose(optimizer.optimizer.param_groups[0]["lr"], 0.025)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] < 0.025


def test_names_with_which_the_torch_optimizer_was_made_choose_algorithms(comm: Communicator) -> None:
    named = [*make_model().named_parameters()]
    by_name = {"*.bias": Dense(), "*": Marsit()}
    for pairs, n_dense in (named, 1), ([*named, *((name, nn.Parameter(torch.ones(1))) for name, _ in named)], 0):
        optimizer = DistributedOptimizer(torch.optim.SGD(pairs), by_name, comm)  # the second ones are not unique
        for _, parameter in pairs:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert [isinstance(one.algorithm, Dense) for one in optimizer.aggregators].count(True) == n_dense


def test_step_hooks_run_once(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, comm, range(3))
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (make_model(), {"synchronize": "gradients", "local_steps": 2}, r"local_steps=2 needs synchronize=.updates"),
        (make_model(), {"local_steps": 0}, "local_steps is 0"),
        (make_model(), {"synchronize": "weights"}, "synchronize is 'weights'"),
        (make_model(), {"bucket_mb": 0}, "bucket_mb is 0"),
        (make_model(), {"bucket_mb": "25"}, "bucket_mb is '25'"),
        (make_model(), {"local_steps": 2.5}, "local_steps is 2.5; choose a whole number"),
        (make_model(), {"backward_passes_per_step": "2"}, "backward_passes_per_step is '2'; choose a whole number"),
        (make_model(), {"overlap": "no"}, "overlap is 'no'; choose True, False or None"),
        (make_model().requires_grad_(False), {}, "no parameter that requires a gradient"),
        (META, {"named_parameters": META.named_parameters()}, "'weight' lives on meta"),
        (nn.Linear(2, 2, dtype=torch.complex64), {}, r"'group 0, parameter 0' is a .*complex64"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(
    comm: Communicator, model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), Marsit(), comm, **options)


@pytest.mark.parametrize("algorithm", [MajorityVote(), SSDM(), SSDM(momentum=0.9)], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_methods_that_return_signs_are_refused_under_updates(algorithm: Any, overlap: bool, comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r'returns signs, .*; pass synchronize="gradients", or take Marsit'):
        wrap(make_model(), algorithm, comm, synchronize="updates", overlap=overlap)
    model, optimizer = wrapped(algorithm, comm)
    train(model, optimizer, comm, range(2))


def test_noise_many_times_longer_than_updates_is_warned_of(comm: Communicator) -> None:
    with pytest.warns(UserWarning, match=r"the error of a result is about sqrt\(n / M\) times as long as the update"):
        wrap(make_model(), SSDM(scale="norm"), comm, synchronize="updates")


def test_whole_numbers_of_numpy_are_taken(comm: Communicator) -> None:
    model, optimizer = wrapped(Marsit(), comm, local_steps=np.int64(2))
    train(model, optimizer, comm, range(4))
    assert optimizer.synchronizations == 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [{"local_steps": 3}, {"synchronize": "gradients"}, {"bucket_mb": 7}])
def test_options_that_differ_are_a_mismatch(comm: Communicator, options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    odd = options if comm.rank == comm.size - 1 else {}
    with pytest.raises(CollectiveMismatch, match=f"{name}={value!r}") as caught:
        DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=1.0), Marsit(), comm, **odd)
    assert "DistributedOptimizer(synchronize='updates', local_steps=1, bucket_mb=25, overlap=False" in str(caught.value)


@pytest.mark.mpi(min_size=2)
def test_what_one_rank_cannot_wrap_is_told_on_every_rank(comm: Communicator) -> None:
    model = nn.Linear(2, 2, device="meta" if comm.rank == 1 else "cpu")
    expected = ValueError if comm.rank == 1 else CollectiveMismatch
    with pytest.raises(expected, match=rf"rank 1 of {comm.size}: parameter 'weight' lives on meta"):
        wrap(model, Dense(), comm)
    comm.barrier()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", ["sgd", "adam", "one bit"])
def test_distributed_checkpoints_that_lose_residuals_are_refused_and_change_nothing(
    kind: str, steps: int, comm: Communicator
) -> None:
    model = make_model()
    one_bit = OneBitAdam(model.named_parameters(), comm=comm)
    optimizer = one_bit if kind == "one bit" else wrap(model, DoubleSqueeze(), comm, kind)
    train(model, optimizer, comm, range(steps))
    before, saved = parameters_of(model), optimizer.state_dict()
    for call in (get_optimizer_state_dict, get_state_dict):
        with pytest.raises(RuntimeError, match=r"residuals and counters.* save optimizer.state_dict\(\) to a file of"):
            call(model, optimizer)
    with pytest.raises(RuntimeError, match=r"load it by optimizer.load_state_dict"):
        set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.synchronizations == steps
    assert all(parameter.grad is None or steps for parameter in model.parameters())
    assert torch.equal(parameters_of(model), before)
    optimizer.load_state_dict(saved)
