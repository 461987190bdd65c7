"""States of optimizers to which parameters were added, or are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import Communicator
from mpicomp import Dense, MemSGD
from mpicomp.torch import DistributedOptimizer, redistribute_states
from tests.mpi.lanes import up_to_four_ranks
from tests.mpi.torch.branches import (
    GRADIENTS,
    UPDATES,
    Branches,
    add,
    in_order,
    started,
    train,
    unfreeze,
    values,
    ways,
    wrap,
)
from tests.mpi.torch.training import same_on_all_ranks

pytestmark = up_to_four_ranks
LOCAL: dict[str, Any] = {**UPDATES, "local_steps": 2}
OUTER: dict[str, Any] = {**UPDATES, "outer": (1, 0.5)}


@pytest.mark.parametrize(
    ("saved_at", "options", "how", "dtype"),
    [
        (2, GRADIENTS, add, torch.float32),
        (2, UPDATES, unfreeze, torch.float32),
        (2, LOCAL, unfreeze, torch.bfloat16),
        (2, OUTER, add, torch.bfloat16),
        (5, GRADIENTS, unfreeze, torch.bfloat16),
        (5, UPDATES, add, torch.bfloat16),
        (5, LOCAL, add, torch.float32),
        (5, OUTER, unfreeze, torch.float32),
        (8, GRADIENTS, unfreeze, torch.float32),
        (8, UPDATES, add, torch.float32),
        (8, LOCAL, unfreeze, torch.bfloat16),
        (8, OUTER, add, torch.bfloat16),
    ],
)
def test_gradual_unfreezing_is_resumed_to_the_bit(
    saved_at: int, options: dict[str, Any], how: Callable[..., None], dtype: torch.dtype, comm: Communicator
) -> None:
    """States of before, between and after two additions: before one is loaded, the parameters that it has are added.

    Any two of place, mode, way and type meet in a case.
    """
    parts = ("new.2", "new.0")

    def grow(model: Branches, optimizer: DistributedOptimizer, part: str) -> None:
        if how is add:
            optimizer.add_param_group({"params": model.get_submodule(part).parameters()})
        else:
            model.get_submodule(part).requires_grad_(True)

    def begin() -> tuple[Branches, DistributedOptimizer]:
        model = Branches(dtype)
        model.new.requires_grad_(how is add)
        parameters = (model.old if how is add else model).parameters()
        return model, wrap(model, parameters, MemSGD("one-bit"), comm, **options)

    def go_on(model: Branches, optimizer: DistributedOptimizer, steps: range) -> None:
        for step in steps:
            if step in (3, 6):
                grow(model, optimizer, parts[step // 3 - 1])
            train(model, optimizer, comm, range(step, step + 1))

    model, optimizer = begin()
    go_on(model, optimizer, range(saved_at))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on(model, optimizer, range(saved_at, 11))
    resumed, again = begin()
    for part in parts[: saved_at // 3]:
        grow(resumed, again, part)
    resumed.load_state_dict(saved[0])
    again.check_state_dict(saved[1])
    again.load_state_dict(saved[1])
    go_on(resumed, again, range(saved_at, 11))
    assert torch.equal(values(resumed), values(model))
    assert again.buckets == optimizer.buckets
    owns = [one.state_dict()["mpicomp"] for one in (again, optimizer)]
    for own in owns:
        own["rounds"].pop("outer", None)  # whose tensors are in the order in which they joined here
    assert in_order(owns[0]) == in_order(owns[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_is_saved_in_local_steps_before_new_parameters_have_joined(
    dtype: torch.dtype, comm: Communicator
) -> None:
    options = {"synchronize": "updates", "local_steps": 4, "dtype": dtype}
    model, optimizer = started(unfreeze, Dense(), comm, **options)
    train(model, optimizer, comm, range(5))
    unfreeze(model, optimizer)
    train(model, optimizer, comm, range(5, 7))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, comm, range(7, 12))
    resumed, again = started(unfreeze, Dense(), comm, **options)
    unfreeze(resumed, again)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, comm, range(7, 12))
    assert torch.equal(values(resumed), values(model))


def test_a_state_of_before_is_loaded_and_parameters_unfrozen_since_wait(comm: Communicator) -> None:
    model, optimizer = started(unfreeze, MemSGD("one-bit"), comm)
    train(model, optimizer, comm, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    unfreeze(model, optimizer)
    train(model, optimizer, comm, range(3, 6))
    resumed, again = started(unfreeze, MemSGD("one-bit"), comm)
    unfreeze(resumed, again)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, comm, range(3, 6))
    assert torch.equal(values(resumed), values(model))
    with pytest.raises(ValueError, match=r"this optimizer has 'new\.0\.bias', .* which the state lacks; .* unfreeze"):
        optimizer.load_state_dict(saved[1])


@ways
def test_a_state_with_parameters_that_are_not_there_yet_is_refused(
    how: Callable[..., None], comm: Communicator
) -> None:
    model, optimizer = started(how, Dense(), comm)
    train(model, optimizer, comm, range(2))
    how(model, optimizer)
    train(model, optimizer, comm, range(2, 4))
    resumed, again = started(how, Dense(), comm)
    with pytest.raises(
        ValueError, match=r"the state has 'new\.0\.bias', .* lacks; .* before you load a state add or unf"
    ):
        again.load_state_dict(optimizer.state_dict())
    how(resumed, again)
    again.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(model.state_dict())
    train(resumed, again, comm, range(4, 6))
    train(model, optimizer, comm, range(4, 6))
    assert torch.equal(values(resumed), values(model))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [GRADIENTS, UPDATES], ids=["gradients", "updates"])
def test_states_with_new_parameters_are_redistributed(options: dict[str, Any], comm: Communicator) -> None:
    model, optimizer = started(unfreeze, MemSGD("one-bit"), comm, **options)
    train(model, optimizer, comm, range(2))
    unfreeze(model, optimizer)
    train(model, optimizer, comm, range(2, 4))
    ranks = comm.size - 1
    states = redistribute_states(comm.mpi_comm.allgather(optimizer.state_dict()), ranks)
    with comm.split(comm.rank < ranks) as part:
        if comm.rank < ranks:
            fewer, again = started(unfreeze, MemSGD("one-bit"), part, **options)
            unfreeze(fewer, again)
            fewer.load_state_dict(model.state_dict())
            again.load_state_dict(states[comm.rank])
            train(fewer, again, part, range(4, 6))
            assert same_on_all_ranks(fewer, part)
            assert again.buckets == optimizer.buckets
