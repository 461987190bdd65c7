"""Parameters that are added to OneBitAdam, unfrozen or frozen while it trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp.torch import OneBitAdam, ZeroOneAdam, redistribute_states
from tests.mpi.lanes import same_text_on, up_to_four_ranks
from tests.mpi.torch.branches import Branches, add, in_order, train, unfreeze, values, ways
from tests.mpi.torch.training import same_on_all_ranks

pytestmark = up_to_four_ranks
ADDED_AT, END = 5, 14
AUTO: dict[str, Any] = {"warmup_steps": "auto", "betas": (0.9, 0.8)}
schedules = pytest.mark.parametrize("options", [{"warmup_steps": 3}, {"warmup_steps": 8}, AUTO], ids=str)


def make(parameters: Any, model: nn.Module, comm: Communicator, **options: Any) -> OneBitAdam:
    options = {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True, **options}
    return OneBitAdam(parameters, comm=comm, named_parameters=model.named_parameters(), bucket_mb=0.001, **options)


def begin(
    how: Any, comm: Communicator, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Branches, OneBitAdam]:
    model = Branches(dtype)
    model.new.requires_grad_(how is add)
    return model, make((model.old if how is add else model).parameters(), model, comm, **options)


@schedules
@ways
def test_new_parameters_go_the_way_of_an_optimizer_of_their_own(
    how: Callable[..., None], options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = begin(how, comm, **options)
    old, new = Branches(), Branches()
    first = make(old.old.parameters(), old, comm, **options)
    train(model, optimizer, comm, range(ADDED_AT))
    how(model, optimizer)
    second = make([*new.new.parameters()][::-1], new, comm, **options)  # the order in vectors that join
    train(old, first, comm, range(END))
    for step in range(ADDED_AT, END):
        train(model, optimizer, comm, range(step, step + 1))
        train(new, second, comm, range(step, step + 1))
        assert torch.equal(values(model.new), values(new.new))
    assert torch.equal(values(model.old), values(old.old))
    assert optimizer.frozen == (first.frozen and second.frozen)
    assert optimizer.steps == END
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
@ways
def test_a_rank_that_adds_none_is_named_on_all_ranks_and_nothing_is_lost(
    how: Callable[..., None], comm: Communicator
) -> None:
    model, optimizer = begin(how, comm, warmup_steps=2)
    train(model, optimizer, comm, range(4))
    before, state = values(model), str(optimizer.state_dict())
    if comm.rank != 1:
        how(model, optimizer)
    told = r"added or unfrozen parameter 0 is 'new\.0\.weight' .* on rank.*0.*, missing on rank 1"
    with pytest.raises(CollectiveMismatch, match=told) as caught:
        train(model, optimizer, comm, range(4, 5))
    same_text_on(comm, caught.value, range(comm.size))
    assert torch.equal(values(model), before)
    if comm.rank == 1:
        assert str(optimizer.state_dict()) == state
        how(model, optimizer)
    train(model, optimizer, comm, range(4, 9))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize(
    ("group", "error", "told"),
    [
        ({"params": [nn.Parameter(torch.zeros(2))], "lr": -1.0}, ValueError, r"rank \d.* lr is -1\.0"),
        ({"params": [nn.Parameter(torch.zeros(2))], "eps": "small"}, TypeError, "are not all numbers"),
        ({"params": [torch.zeros(2, dtype=torch.int64)]}, ValueError, r"torch\.int64; leave it out"),
        ({"params": [("old.0.bias", nn.Parameter(torch.zeros(2)))]}, ValueError, r"2 parameters are called 'old\.0"),
    ],
)
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(
    group: dict[str, Any], error: type[Exception], told: str, comm: Communicator
) -> None:
    model, optimizer = begin(add, comm, warmup_steps=2)
    train(model, optimizer, comm, range(2))
    with pytest.raises(error, match=told):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    add(model, optimizer)
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("frozen_at", [2, 6])
def test_frozen_parameters_rest_with_their_moments(frozen_at: int, comm: Communicator) -> None:
    model = Branches()
    optimizer = make(model.parameters(), model, comm, warmup_steps=4)
    train(model, optimizer, comm, range(frozen_at))
    model.new.requires_grad_(False)
    before, state = values(model.new), optimizer.state_dict()["mpicomp"]
    train(model, optimizer, comm, range(frozen_at, frozen_at + 1))
    after = optimizer.state_dict()["mpicomp"]
    for key in ("m",) if after["frozen"] else ("m", "v"):
        for name in state[key]:
            assert torch.equal(after[key][name], state[key][name]) == name.startswith("new")
    train(model, optimizer, comm, range(frozen_at + 1, 9))
    assert torch.equal(values(model.new), before)
    model.new.requires_grad_(True)
    train(model, optimizer, comm, range(9, 11))
    assert not torch.equal(values(model.new), before)
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize(
    ("saved_at", "options", "how", "dtype"),
    [
        (4, {"warmup_steps": 3}, add, torch.float32),
        (4, {"warmup_steps": 8}, unfreeze, torch.float32),
        (4, AUTO, unfreeze, torch.bfloat16),
        (6, {"warmup_steps": 3}, unfreeze, torch.bfloat16),
        (6, {"warmup_steps": 8}, add, torch.bfloat16),
        (6, AUTO, add, torch.float32),
        (12, {"warmup_steps": 3}, unfreeze, torch.float32),
        (12, {"warmup_steps": 8}, unfreeze, torch.float32),
        (12, AUTO, add, torch.bfloat16),
    ],
)
def test_training_is_resumed_to_the_bit(
    saved_at: int, options: dict[str, Any], how: Callable[..., None], dtype: torch.dtype, comm: Communicator
) -> None:
    """Any two of place, schedule, way and type meet in a case."""
    model, optimizer = begin(how, comm, dtype, **options)

    def go_on(model: Branches, optimizer: OneBitAdam, steps: range) -> None:
        for step in steps:
            if step == ADDED_AT:
                how(model, optimizer)
            train(model, optimizer, comm, range(step, step + 1))

    go_on(model, optimizer, range(saved_at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on(model, optimizer, range(saved_at, END))
    resumed, again = begin(how, comm, dtype, **options)
    if saved_at > ADDED_AT:
        with pytest.raises(ValueError, match="before you load a state add or unfreeze"):
            again.load_state_dict(saved[1])
        how(resumed, again)
    resumed.load_state_dict(saved[0])
    again.check_state_dict(saved[1])
    again.load_state_dict(saved[1])
    go_on(resumed, again, range(saved_at, END))
    assert torch.equal(values(resumed), values(model))
    assert in_order(again.state_dict()["mpicomp"]) == in_order(optimizer.state_dict()["mpicomp"])


@pytest.mark.mpi(min_size=2)
def test_states_with_new_parameters_are_redistributed(comm: Communicator) -> None:
    model, optimizer = begin(unfreeze, comm, warmup_steps=2)
    train(model, optimizer, comm, range(3))
    unfreeze(model, optimizer)
    train(model, optimizer, comm, range(3, 7))
    ranks = comm.size - 1
    states = redistribute_states(comm.mpi_comm.allgather(optimizer.state_dict()), ranks)
    with comm.split(comm.rank < ranks) as part:
        if comm.rank < ranks:
            fewer, again = begin(unfreeze, part, warmup_steps=2)
            unfreeze(fewer, again)
            fewer.load_state_dict(model.state_dict())
            again.load_state_dict(states[comm.rank])
            train(fewer, again, part, range(7, 9))
            assert same_on_all_ranks(fewer, part)
            assert again.frozen


def test_a_damaged_entry_of_parameters_that_joined_is_refused(comm: Communicator) -> None:
    model, optimizer = begin(unfreeze, comm, warmup_steps=2)
    train(model, optimizer, comm, range(3))
    unfreeze(model, optimizer)
    train(model, optimizer, comm, range(3, 4))
    state = optimizer.state_dict()
    for told, damaged in {
        "not a list": 3,
        "is damaged": [{}],
        "not an integer from 0": [{**state["mpicomp"]["joined"][0], "joined": -1}],
        "the state lacks": [],
    }.items():
        bad = {**state, "mpicomp": {**state["mpicomp"], "joined": damaged}}
        with pytest.raises(ValueError, match=told):
            optimizer.load_state_dict(bad)
    optimizer.load_state_dict(state)
    train(model, optimizer, comm, range(4, 6))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("change", ["swapped", "moved to the other's end", "moved across the boundary", "merged"])
@pytest.mark.parametrize("moved_at", [2, 6])  # before and after v is frozen
@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam])
def test_parameters_that_change_their_groups_take_the_options_there(
    kind: type[OneBitAdam | ZeroOneAdam], moved_at: int, change: str, comm: Communicator
) -> None:
    model = Branches()
    (first, *others), rest = [*model.old.parameters()], [*model.new.parameters()]
    groups = [{"params": [*others, first], "lr": 0.0}, {"params": rest, "lr": 0.01}]
    optimizer = kind(groups, comm=comm, named_parameters=model.named_parameters(), bucket_mb=0.001, warmup_steps=4)
    train(model, optimizer, comm, range(moved_at))
    still, moving = optimizer.param_groups
    before, moves_before = first.detach().clone(), rest[0].detach().clone()
    still["params"].pop()
    if change == "moved to the other's end":
        moving["params"].append(first)
    else:
        moving["params"].insert(0, first)
    if change == "swapped":
        still["params"].append(moving["params"].pop(1))
    elif change == "merged":
        moving["params"][:0] = still["params"]
        del optimizer.param_groups[0]
    train(model, optimizer, comm, range(moved_at, moved_at + 3))
    assert not torch.equal(first, before)
    if kind is OneBitAdam or moved_at == 2:  # else errors of steps at the other rate are still sent
        assert torch.equal(rest[0], moves_before) == (change == "swapped")
    assert same_on_all_ranks(model, comm)
