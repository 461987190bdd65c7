"""Ranks that add different parameters, and parameters that cannot join: nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, MemSGD
from mpicomp.torch import broadcast_parameters
from tests.mpi.lanes import same_text_on, up_to_four_ranks
from tests.mpi.torch.branches import (
    FUSED,
    Branches,
    add,
    backward,
    modes,
    started,
    train,
    values,
    ways,
    wrap,
)
from tests.mpi.torch.training import same_on_all_ranks

pytestmark = up_to_four_ranks


@pytest.mark.mpi(min_size=2)
@modes
@ways
@pytest.mark.parametrize("algorithm", [Dense(), MemSGD("one-bit")], ids=str)
def test_a_rank_that_adds_none_or_others_is_named_on_all_ranks_and_nothing_is_lost(
    algorithm: Any, how: Callable[..., None], options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(how, algorithm, comm, **options)
    train(model, optimizer, comm, range(2))
    before, residuals = values(model), copy.deepcopy([one.state_dict() for one in optimizer.aggregators])
    if comm.rank != 1:
        how(model, optimizer)
    for odd in ("none", "others"):
        told = r"added or unfrozen parameter \d is 'new\.\d\.weight' .* on rank.*0.*, missing on rank 1: before a step"
        if odd == "others" and comm.rank == 1:
            if how is add:
                optimizer.add_param_group({"params": model.new[0].parameters()})
            else:
                model.new[0].requires_grad_(True)
        with pytest.raises(CollectiveMismatch, match=told) as caught:
            train(model, optimizer, comm, range(2, 3))
        same_text_on(comm, caught.value, range(comm.size))
        assert torch.equal(values(model), before)
        if options["synchronize"] == "gradients":  # whose calls are undone; others have made their moves
            assert str([one.state_dict() for one in optimizer.aggregators]) == str(residuals)
    if how is add:
        if comm.rank == 1:
            optimizer.optimizer.param_groups.pop()
            add(model, optimizer)
    else:
        model.new.requires_grad_(True)
    train(model, optimizer, comm, range(2, 5))
    assert same_on_all_ranks(model, comm)
    assert len(set(map(str, optimizer.buckets))) == len(optimizer.buckets)
    assert sum(map(len, optimizer.buckets)) == 8


@pytest.mark.mpi(min_size=2)
@modes
def test_new_parameters_of_other_values_are_named_and_may_be_made_equal(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(add, Dense(), comm, **options)
    train(model, optimizer, comm, range(2))
    model.new[0].weight.data += comm.rank
    add(model, optimizer)
    with pytest.raises(CollectiveMismatch, match=r"models differ in 1 of 4 tensors, the first of which is 'new\.0\.w"):
        train(model, optimizer, comm, range(2, 3))
    broadcast_parameters(model, comm)
    train(model, optimizer, comm, range(3, 6))
    assert same_on_all_ranks(model, comm)


@pytest.mark.mpi(min_size=2)
@modes
@pytest.mark.parametrize("difference", ["shape", "dtype", "name", "algorithm", "order"])
def test_new_parameters_of_another_form_on_one_rank_are_refused(
    difference: str, options: dict[str, Any], comm: Communicator
) -> None:
    odd = comm.rank == comm.size - 1
    model = Branches()

    def choose(name: str, parameter: Tensor) -> Any:
        return MemSGD("one-bit") if difference == "algorithm" and odd and name == "a" else Dense()

    optimizer = wrap(model, model.old.parameters(), choose, comm, **options)
    train(model, optimizer, comm, range(2))
    dtype = torch.float64 if difference == "dtype" and odd else torch.float32
    added = [
        ("a", nn.Parameter(torch.zeros(5 + (difference == "shape" and odd), dtype=dtype))),
        ("c" if difference == "name" and odd else "b", nn.Parameter(torch.zeros(5))),
    ]
    optimizer.add_param_group({"params": added[::-1] if difference == "order" and odd else added})
    with pytest.raises(CollectiveMismatch, match=r"added or unfrozen parameter [01] is '[ab]' \(torch"):
        train(model, optimizer, comm, range(2, 3))
    comm.barrier()


@pytest.mark.parametrize(
    ("group", "error", "told"),
    [
        ({"params": [nn.Parameter(torch.zeros(2)).to_sparse()]}, ValueError, "non-leaf"),
        ({"params": [torch.zeros(2, dtype=torch.int64)]}, ValueError, r"rank \d.*torch\.int64; leave it out"),
        ({"params": [("old.0.bias", nn.Parameter(torch.zeros(2)))]}, ValueError, r"2 parameters are called 'old\.0"),
        ({"params": [("odd", nn.Parameter(torch.zeros(2)))]}, ValueError, "no pattern among .* fits 'odd'"),
        ({"params": [3]}, TypeError, "optimizer can only optimize Tensors"),
        ({"params": [nn.Parameter(torch.zeros(2, device="meta"))]}, ValueError, "lives on meta"),
        ([], TypeError, "param_group must be a dict"),
    ],
)
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was(
    group: Any, error: type[Exception], told: str, comm: Communicator
) -> None:
    model = Branches()
    optimizer = wrap(model, model.old.parameters(), {"old*": Dense(), "new*": Dense()}, comm)
    train(model, optimizer, comm, range(2))
    with pytest.raises(error, match=told):
        optimizer.add_param_group(group)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [model.old[0].bias]})
    assert len(optimizer.param_groups) == 1
    add(model, optimizer)
    train(model, optimizer, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


def test_new_parameters_must_fit_the_options(comm: Communicator) -> None:
    model = Branches()
    optimizer = wrap(model, model.old.parameters(), Dense(), comm, **FUSED)
    with pytest.raises(ValueError, match=r"'half' is of torch\.bfloat16, which cannot be combined with overlap"):
        optimizer.add_param_group({"params": [("half", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))]})
    model.new.requires_grad_(False)
    chosen = wrap(model, model.parameters(), {"old*": Dense()}, comm)
    train(model, chosen, comm, range(2))
    before = values(model)
    model.new.requires_grad_(True)
    with pytest.raises(ValueError, match=r"no pattern among 'old\*' fits 'new\.0\.weight'"):
        train(model, chosen, comm, range(2, 3))
    assert torch.equal(values(model), before)
    model.new.requires_grad_(False)
    train(model, chosen, comm, range(2, 4))
    assert same_on_all_ranks(model, comm)


@modes
def test_nan_in_new_parameters_names_them_and_training_goes_on(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = started(add, MemSGD("one-bit"), comm, **options)
    train(model, optimizer, comm, range(2))
    add(model, optimizer)
    before = values(model)
    backward(model, optimizer, comm, 2)
    if comm.rank == comm.size - 1:
        model.new[2].bias.grad[1] = float("nan")
    with pytest.raises(NonFiniteGradient) as caught:
        optimizer.step()
    assert caught.value.ranks == (comm.size - 1,)
    assert ("'new.2.bias'" in str(caught.value)) == (comm.rank == comm.size - 1)
    if options["synchronize"] == "gradients":
        assert torch.equal(values(model), before)
    for parameter in model.parameters():
        optimizer.state.pop(parameter, None)  # a momentum may hold the NaN
    train(model, optimizer, comm, range(3, 5))
    assert same_on_all_ranks(model, comm)
    assert sum(map(len, optimizer.buckets)) == 8
