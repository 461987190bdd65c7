"""Ranks whose optimizers, options or models differ: all of them raise in the same step, which no rank makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import QSGD, Dense, DoubleSqueeze, Marsit
from mpicomp.torch import DistributedOptimizer, OneBitAdam, require_same
from mpicomp.torch.synchronizer import synchronizer
from tests.mpi.lanes import three_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, same_on_all_ranks, train, wrap, wrapped

pytestmark = three_ranks
MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"overlap": False},
    "updates": {"synchronize": "updates", "overlap": False},
    "updates, overlap": {"synchronize": "updates", "overlap": True},
}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())


def set_option(key: str, value: Any) -> Callable[[nn.Module, DistributedOptimizer], None]:
    def change(model: nn.Module, optimizer: DistributedOptimizer) -> None:
        optimizer.param_groups[0][key] = value

    return change


def load_another_rate(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    state = optimizer.optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.optimizer.load_state_dict(state)


def step_a_scheduler_on_its_own_loss(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)


def reload_the_model(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    model.load_state_dict(make_model(seed=5).state_dict())


CHANGES: dict[str, tuple[Callable[[nn.Module, DistributedOptimizer], None], str]] = {
    "lr": (set_option("lr", 0.25), r"'lr' of parameter group 0 is 0\.05 on rank.*, 0\.25 on rank 1"),
    "momentum": (set_option("momentum", 0.5), "'momentum' of parameter group 0 is 0.9 on rank.*, 0.5 on rank 1"),
    "weight decay": (set_option("weight_decay", 0.1), r"'weight_decay' of parameter group 0 is 0\.0 on rank"),
    "tensor": (set_option("lr", torch.tensor(0.25)), r"'lr' of parameter group 0 is 0\.05 on rank.*, 0\.25 on rank 1"),
    "new key": (set_option("alpha", 3), r"'alpha' of parameter group 0 is missing on rank"),
    "loaded": (load_another_rate, r"'lr' of parameter group 0 is 0\.05 on rank.*, 0\.5 on rank 1"),
    "plateau": (step_a_scheduler_on_its_own_loss, "comm.allreduce.loss, op='mean'."),
    "reloaded": (reload_the_model, r"models differ .* in parameter '.*'.* broadcast_parameters\(model, comm\)"),
}


@modes
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_named_on_all_ranks_and_no_rank_steps(
    name: str, options: dict[str, Any], comm: Communicator
) -> None:
    change, told = CHANGES[name]
    model, optimizer = wrapped(DoubleSqueeze(), comm, **options)
    train(model, optimizer, comm, range(2))
    if comm.rank == 1:
        change(model, optimizer)
    before = parameters_of(model)
    with pytest.raises(CollectiveMismatch, match=f"{told}.*No rank has made the step"):
        train(model, optimizer, comm, range(2, 3))
    assert torch.equal(parameters_of(model), before)
    comm.barrier()  # the communicator is as good as before


@modes
def test_equal_changes_on_all_ranks_are_taken(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        train(model, optimizer, comm, range(step, step + 1))
        scheduler.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)
    train(model, optimizer, comm, range(4, 6))
    assert same_on_all_ranks(model, comm)


IN_PLACE = {"list": [0.75, 0.5], "tensors": (torch.tensor(0.75), torch.tensor(0.5)), "array": np.array([0.75, 0.5])}


@modes
@pytest.mark.parametrize("kind", IN_PLACE)
def test_options_that_are_changed_in_place_are_compared(kind: str, options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    betas: Any = copy.deepcopy(IN_PLACE[kind])
    optimizer.param_groups[0]["betas"] = betas
    train(model, optimizer, comm, range(2))
    if comm.rank == 1 and kind == "tensors":
        betas[0].fill_(0.25)
    elif comm.rank == 1:
        betas[0] = 0.25
    told = r"'betas' of parameter group 0 is \(0\.75, 0\.5\) on rank.*, \(0\.25, 0\.5\) on rank 1"
    with pytest.raises(CollectiveMismatch, match=told):
        train(model, optimizer, comm, range(2, 3))


@modes
def test_parameters_change_their_groups_on_all_ranks_or_on_none(options: dict[str, Any], comm: Communicator) -> None:
    model = make_model()
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.0}]
    sgd = torch.optim.SGD(groups, lr=0.05)
    optimizer = DistributedOptimizer(sgd, Dense(), comm, model.named_parameters(), bucket_mb=0.001, **options)
    train(model, optimizer, comm, range(2))
    (weight, *first), (other, *second) = (group["params"] for group in sgd.param_groups)
    moved = (other, *first), (weight, *second)
    for rank_moves in (comm.rank == 1, comm.rank != 1):
        if rank_moves:
            for group, parameters in zip(sgd.param_groups, moved, strict=True):
                group["params"][:] = parameters
        before = weight.detach().clone()
        if rank_moves == (comm.rank == 1):
            with pytest.raises(CollectiveMismatch, match="division of the parameters among groups differs"):
                train(model, optimizer, comm, range(2, 3))
        else:
            train(model, optimizer, comm, range(3, 6))
            assert torch.equal(weight, before)  # by the rate of its new group
    assert same_on_all_ranks(model, comm)


@modes
def test_the_order_of_parameters_within_a_group_may_change(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    if comm.rank == 1:
        optimizer.param_groups[0]["params"].reverse()
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("options", [MODES["overlap"], MODES["no overlap"], MODES["updates"]], ids=str)
@pytest.mark.parametrize("kind", ["number", "used iterator", "iterator"])
def test_a_group_without_a_list_of_tensors_on_one_rank_is_refused_by_all_or_taken(
    kind: str, options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    group = optimizer.param_groups[0]
    model.zero_grad()
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == 1:
        parameters = iter([*group["params"]])
        group["params"] = [*parameters, 3] if kind == "number" else parameters
        if kind == "used iterator":
            list(parameters)
    if kind == "iterator":
        optimizer.step()
        assert same_on_all_ranks(model, comm)
        return
    told = "parameter 4 of group 0 is 3; put tensors" if kind == "number" else "no longer holds parameter"
    with pytest.raises(ValueError if comm.rank == 1 else CollectiveMismatch, match=told):
        optimizer.step()


def test_a_difference_is_named_when_the_optimizer_is_wrapped(comm: Communicator) -> None:
    model = make_model()
    classes = {0: torch.optim.SGD, 1: torch.optim.Adam}
    with pytest.raises(CollectiveMismatch, match=r"the class of the optimizer is SGD on rank.*, Adam on rank 1"):
        DistributedOptimizer(classes.get(comm.rank, torch.optim.SGD)(model.parameters(), lr=0.1), Dense(), comm)
    with pytest.raises(CollectiveMismatch, match=r"'lr' of parameter group 0 is 0\.0 on rank 0, 1\.0 on rank 1"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=float(comm.rank)), Dense(), comm)


def test_a_rate_that_differs_is_named_by_one_bit_adam(comm: Communicator) -> None:
    model = make_model()
    optimizer = OneBitAdam(model.parameters(), comm=comm, warmup_steps=2)
    train(model, optimizer, comm, range(3))
    optimizer.param_groups[0]["lr"] *= 1 + comm.rank
    with pytest.raises(CollectiveMismatch, match=r"'lr' of parameter group 0 is 0\.001 on rank 0, 0\.002 on rank 1"):
        train(model, optimizer, comm, range(3, 4))
    optimizer.param_groups[0]["lr"] = 0.001
    train(model, optimizer, comm, range(3, 4))
    assert same_on_all_ranks(model, comm)


def test_estimates_of_a_rank_are_its_own_under_updates(comm: Communicator) -> None:
    model, optimizer = wrapped(Marsit(), comm)
    optimizer.param_groups[0]["d_estimate"] = 0.0
    for step in range(3):
        optimizer.param_groups[0]["d_estimate"] += comm.rank
        train(model, optimizer, comm, range(step, step + 1))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("name", ["lbfgs", "sgd"])
def test_a_closure_of_the_ranks_own_loss_is_refused_where_the_optimizer_decides_by_it(
    name: str, comm: Communicator
) -> None:
    model = make_model()
    inner = (
        torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
        if name == "lbfgs"
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = DistributedOptimizer(inner, Dense(), comm)
    inputs, labels = batch(comm.rank)

    def closure(averaged: bool) -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        return comm.allreduce(loss.detach(), op="mean") if averaged else loss

    optimizer.step(lambda: closure(averaged=True))
    assert same_on_all_ranks(model, comm)
    if name == "sgd":
        optimizer.step(lambda: closure(averaged=False))
        return
    with pytest.raises(CollectiveMismatch, match=r"the closure's loss is .*: return the mean of the ranks' losses"):
        optimizer.step(lambda: closure(averaged=False))


def test_models_are_compared_as_a_whole_from_time_to_time(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronizer, "COMPARE_EVERY", 4)
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(3))
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight[36, 9] += 1e-6  # which samples come to much later
    told = r"the ranks' models differ in \d of 4 tensors, the first of which is '.*' \(checksum .* on rank"
    with pytest.raises(CollectiveMismatch, match=told):
        train(model, optimizer, comm, range(3, 9))


def test_models_are_compared_where_gradients_are_averaged_before_the_step(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synchronizer, "COMPARE_EVERY", 2)
    model, optimizer = wrapped(Dense(), comm)
    inputs, labels = batch(comm.rank)

    def train_with_the_mean() -> None:
        for step in range(6):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.synchronize()
            optimizer.step()
            if step == 0 and comm.rank == 1:
                with torch.no_grad():
                    model[0].weight[36, 9] += 1e-6

    with pytest.raises(CollectiveMismatch, match=r"the ranks' models differ in \d of 4 tensors"):
        train_with_the_mean()


def test_a_refusal_is_named_where_the_ranks_compare_their_models(comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm)
    train(model, optimizer, comm, range(2))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == 1:
        model[0].weight.data = model[0].weight.data.double()
    with pytest.raises((ValueError, CollectiveMismatch), match=r"parameter '0\.weight' was torch\.float32\[37, 10\]"):
        optimizer.step()
    comm.barrier()


@pytest.mark.parametrize("options", [{"synchronize": "gradients"}, {"synchronize": "gradients", "overlap": False}, {}])
def test_a_refused_step_keeps_full_precision_rounds_of_all_buckets_together(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = wrapped(Marsit(3), comm, **options)
    train(model, optimizer, comm, range(2))
    optimizer.param_groups[0]["lr"] = 0.05 * (1 + comm.rank)
    with pytest.raises(CollectiveMismatch, match="'lr' of parameter group 0"):
        train(model, optimizer, comm, range(2, 3))
    optimizer.param_groups[0]["lr"] = 0.05
    train(model, optimizer, comm, range(2, 6))
    assert {one.step for one in optimizer.aggregators} == {optimizer.synchronizations} == {6}


def test_require_same_names_the_tensor_and_the_ranks(comm: Communicator) -> None:
    model = make_model()
    require_same(model, comm)
    if comm.rank == comm.size - 1:
        model[2].bias.data[1] += 1
    others = "rank 0" if comm.size == 2 else f"ranks 0-{comm.size - 2}"
    told = rf"1 of 4 tensors, the first of which is '2\.bias' \(checksum \w+ on {others}, checksum \w+ on rank "
    with pytest.raises(CollectiveMismatch, match=told + str(comm.size - 1)):
        require_same(model, comm)
    wider = nn.Linear(2, 2 + comm.rank)
    with pytest.raises(CollectiveMismatch):
        require_same(wider, comm)


@modes
@pytest.mark.parametrize("change", ["frozen", "unfrozen", "widened"])
def test_a_parameter_changed_on_one_rank_alone_is_refused_by_all_in_the_same_step(
    change: str, options: dict[str, Any], comm: Communicator
) -> None:
    model = nn.Sequential(make_model(), nn.Linear(3, 3))
    model[1].bias.requires_grad_(False)
    optimizer = wrap(model, Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    before = parameters_of(model)
    optimizer.zero_grad()
    inputs, labels = batch(comm.rank)
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if comm.rank == 0:
        parameter = model[1].bias if change == "unfrozen" else model[1].weight
        if change == "widened":
            parameter.data = parameter.data.double()
        else:
            parameter.requires_grad_(change == "unfrozen")
    told = r"(frozen parameter 0 is|unfrozen parameter 0 is|parameter) '1\.\w+' (on rank 0|\(torch|was torch\.float32)"
    with pytest.raises((ValueError, CollectiveMismatch), match=told):
        optimizer.step()
    assert torch.equal(parameters_of(model).float(), before)


@pytest.mark.parametrize("change", ["frozen", "unfrozen"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_parameter_changed_before_a_local_step_is_refused_by_all_in_one_step(
    overlap: bool, change: str, comm: Communicator
) -> None:
    model = nn.Sequential(make_model(), nn.Linear(3, 3))
    model[1].bias.requires_grad_(False)
    optimizer = wrap(model, Dense(), comm, synchronize="updates", overlap=overlap, local_steps=2)
    train(model, optimizer, comm, range(2))
    common = parameters_of(model)
    if comm.rank == 0:
        (model[1].bias if change == "unfrozen" else model[1].weight).requires_grad_(change == "unfrozen")
    train(model, optimizer, comm, range(2, 3))  # without a call, in which the other ranks could learn of it
    with pytest.raises(
        CollectiveMismatch, match=rf"{change} parameter 0 is '1\.\w+' .*on rank 0, missing on ranks 1-2"
    ):
        train(model, optimizer, comm, range(3, 4))
    assert torch.equal(parameters_of(model), common)  # also the unfrozen parameter, which has moved in the local step
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is not model[1].bias)
    train(model, optimizer, comm, range(4, 6))
    assert same_on_all_ranks(model, comm)
    assert not torch.equal(parameters_of(model), common)


@modes
def test_lists_and_arrays_in_groups_may_be_replaced_by_equal_ones(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = wrapped(Dense(), comm, **options)
    for step in range(4):
        group = optimizer.param_groups[0]
        group |= {"params": [*group["params"]], "rows": np.arange(3), "tensors": [torch.ones(2)]}
        train(model, optimizer, comm, range(step, step + 1))
    assert same_on_all_ranks(model, comm)


def strided_parameters(contiguous: bool) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    layouts = {
        "transposed": torch.randn(7, 5).t(),
        "permuted": torch.randn(4, 6, 5).permute(2, 0, 1),
        "every second": torch.randn(9)[::2],
        "one element": torch.randn(7)[::7],
        "longer than a sample": torch.randn(60, 50, dtype=torch.float64).t(),
    }
    return {
        name: nn.Parameter(tensor.clone(memory_format=torch.contiguous_format) if contiguous else tensor)
        for name, tensor in layouts.items()
    }


@modes
def test_parameters_that_are_not_contiguous_train_as_contiguous_ones(
    options: dict[str, Any], comm: Communicator
) -> None:
    both = [strided_parameters(contiguous) for contiguous in (True, False)]
    for named in both:
        sgd = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(sgd, Dense(), comm, named.items(), bucket_mb=0.001, **options)
        for step in range(2 * len(named)):  # a sample of each, and another one
            optimizer.zero_grad()
            torch.stack([(one - comm.rank - step).square().sum().float() for one in named.values()]).sum().backward()
            optimizer.step()
        require_same(named, comm)
    for name, parameter in both[0].items():
        assert torch.equal(both[1][name], parameter)


def test_equal_models_of_other_memory_formats_are_equal(comm: Communicator) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last if comm.rank else torch.contiguous_format)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), QSGD(levels=7), comm)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 3, 5, 5)).sum().backward()
        optimizer.step()
