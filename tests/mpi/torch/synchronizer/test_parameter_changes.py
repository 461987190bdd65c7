"""Parameters that are added or unfrozen while an optimizer trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collectives import Communicator
from mpicomp import Dense, DoubleSqueeze, LocalTopK, Marsit
from tests.mpi.lanes import up_to_four_ranks
from tests.mpi.torch.branches import (
    FUSED,
    GRADIENTS,
    IN_TURN,
    UPDATES,
    Branches,
    add,
    backward,
    modes,
    sgd,
    started,
    train,
    unfreeze,
    values,
    ways,
    wrap,
)
from tests.mpi.torch.training import batch, same_on_all_ranks

pytestmark = up_to_four_ranks
ADDED_AT, END = 3, 7


@pytest.mark.parametrize(
    ("algorithm", "options", "how"),
    [
        (Dense(), GRADIENTS, add),
        (Dense(), IN_TURN, unfreeze),
        (Dense(), UPDATES, add),
        (Dense(), FUSED, unfreeze),
        (LocalTopK(4), GRADIENTS, unfreeze),
        (LocalTopK(4), IN_TURN, add),
        (LocalTopK(4), UPDATES, unfreeze),
        (LocalTopK(4), FUSED, add),
        (Marsit(3), GRADIENTS, add),
        (Marsit(3), FUSED, unfreeze),
    ],
)
def test_old_parameters_go_the_way_that_they_go_without_new_ones(
    algorithm: Any, options: dict[str, Any], how: Callable[..., None], comm: Communicator
) -> None:
    model, optimizer = started(how, algorithm, comm, **options)
    alone = Branches()
    alone.new.requires_grad_(False)
    other = wrap(alone, alone.old.parameters(), algorithm, comm, **options)
    train(model, optimizer, comm, range(ADDED_AT))
    before = values(model.new)
    how(model, optimizer)
    train(model, optimizer, comm, range(ADDED_AT, END))
    train(alone, other, comm, range(END))
    assert torch.equal(values(model.old), values(alone.old))
    assert same_on_all_ranks(model, comm)
    assert not torch.equal(values(model.new), before)
    assert [one.step for one in optimizer.aggregators] == [END] * len(other.aggregators) + [END - ADDED_AT] * (
        len(optimizer.aggregators) - len(other.aggregators)
    )
    assert optimizer.buckets[: len(other.buckets)] == other.buckets


@ways
@pytest.mark.parametrize("overlap", [False, True])
def test_new_parameters_join_where_local_steps_are_ended_before_their_first_one(
    how: Callable[..., None], overlap: bool, comm: Communicator
) -> None:
    options = {"synchronize": "updates", "local_steps": 4, "overlap": overlap}
    model, optimizer = started(how, Dense(), comm, **options)
    train(model, optimizer, comm, range(6))
    before = values(model.new)
    how(model, optimizer)
    optimizer.synchronize()
    assert torch.equal(values(model.new), before)
    train(model, optimizer, comm, range(6, 10))
    assert not torch.equal(values(model.new), before)
    assert same_on_all_ranks(model, comm)


@ways
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *((torch.float32, options) for options in (GRADIENTS, IN_TURN, UPDATES, FUSED)),
        *((torch.bfloat16, options) for options in (GRADIENTS, IN_TURN, UPDATES)),
    ],
)
def test_new_parameters_go_the_way_of_an_optimizer_of_their_own(
    dtype: torch.dtype, how: Callable[..., None], options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(how, Dense(), comm, dtype=dtype, **options)
    train(model, optimizer, comm, range(ADDED_AT))
    alone = Branches(dtype)
    alone.old.requires_grad_(False)
    other = wrap(alone, alone.new.parameters(), Dense(), comm, **options)
    how(model, optimizer)
    for step in range(ADDED_AT, END):  # from the first step on
        train(model, optimizer, comm, range(step, step + 1))
        train(alone, other, comm, range(step, step + 1))
        assert torch.equal(values(model.new), values(alone.new))
    assert same_on_all_ranks(model, comm)


@modes
@ways
def test_new_parameters_join_at_once_between_backward_and_step(
    how: Callable[..., None], options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(how, Dense(), comm, **options)
    train(model, optimizer, comm, range(ADDED_AT))
    backward(model, optimizer, comm, ADDED_AT)
    how(model, optimizer)  # buckets may be in flight
    optimizer.step()
    train(model, optimizer, comm, range(ADDED_AT + 1, END))
    assert optimizer.synchronizations == END
    assert same_on_all_ranks(model, comm)


@ways
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("added_at", [3, 4, 5])
def test_new_parameters_join_in_the_middle_of_local_steps(
    added_at: int, overlap: bool, how: Callable[..., None], comm: Communicator
) -> None:
    """The moves of all local steps since are averaged: with dense SGD they are those of one rank's own steps."""
    options = {"synchronize": "updates", "local_steps": 3, "overlap": overlap}
    model, optimizer = started(how, Dense(), comm, **options)
    train(model, optimizer, comm, range(added_at))
    how(model, optimizer)
    alone = Branches()
    alone.load_state_dict(model.state_dict())
    train(alone, sgd(alone.new.parameters()), comm, range(added_at, 6))
    moved = comm.mpi_comm.allgather(values(alone.new))
    train(model, optimizer, comm, range(added_at, 6))
    torch.testing.assert_close(values(model.new), torch.stack(moved).mean(0))
    train(model, optimizer, comm, range(6, 12))
    assert same_on_all_ranks(model, comm)
    assert optimizer.synchronizations == 4


@modes
def test_parameters_are_added_again_and_again_also_before_the_first_step(
    options: dict[str, Any], comm: Communicator
) -> None:
    model = Branches()
    parts = [model.old[2], model.old[0], model.new[2], model.new[0]]
    optimizer = wrap(model, parts[0].parameters(), DoubleSqueeze(), comm, **options)
    for number, part in enumerate(parts[1:]):
        optimizer.add_param_group({"params": part.parameters(), "lr": 0.01})
        train(model, optimizer, comm, range(2 * number, 2 * number + 2))
    assert same_on_all_ranks(model, comm)
    assert sorted(name for names in optimizer.buckets for name in names) == sorted(dict(model.named_parameters()))
    assert len({aggregator.step for aggregator in optimizer.aggregators}) == 3
    assert [aggregator.vector_id for aggregator in optimizer.aggregators] == list(range(len(optimizer.buckets)))
    assert len(optimizer.param_groups) == 4


@pytest.mark.parametrize("options", [GRADIENTS, IN_TURN, UPDATES], ids=["gradients", "in-turn", "updates"])
def test_a_grad_scaler_and_accumulated_gradients_take_new_parameters(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(add, Dense(), comm, backward_passes_per_step=2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    plain = Branches()
    reference = sgd(plain.old.parameters())
    for step in range(5):
        if step == 2:
            optimizer.add_param_group({"params": model.new.parameters()})
            reference.add_param_group({"params": plain.new.parameters()})
        optimizer.zero_grad()
        reference.zero_grad()
        for part in range(2):
            inputs, labels = batch(10 * step + part)  # the same on all ranks
            scaler.scale(model.loss(inputs, labels)).backward()
            plain.loss(inputs, labels).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.step()
    torch.testing.assert_close(values(model), values(plain))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", [GRADIENTS, UPDATES], ids=["gradients", "updates"])
def test_a_grad_scaler_skips_a_step_with_infinities_in_new_parameters(
    options: dict[str, Any], comm: Communicator
) -> None:
    model, optimizer = started(unfreeze, Dense(), comm, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    before = values(model)
    for step in range(3):
        model.new.requires_grad_(True)
        optimizer.zero_grad()
        inputs, labels = batch(step)
        scaler.scale(model.loss(inputs, labels)).backward()
        if step == 0 and comm.rank == 1:
            model.new[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        if step == 0:
            assert torch.equal(values(model), before)
    assert scaler.get_scale() == 8.0
    assert same_on_all_ranks(model, comm)
    assert not torch.equal(values(model.new), before[-values(model.new).numel() :])


@ways
@pytest.mark.parametrize("outer", [(0.7, 0.6), lambda parameters: torch.optim.SGD(parameters, lr=0.7)], ids=["", "own"])
def test_an_outer_optimizer_moves_new_parameters_too(outer: Any, how: Callable[..., None], comm: Communicator) -> None:
    options = {"synchronize": "updates", "local_steps": 2, "outer": outer}
    model, optimizer = started(how, Dense(), comm, **options)
    train(model, optimizer, comm, range(4))
    how(model, optimizer)
    alone = Branches()
    alone.old.requires_grad_(False)
    other = wrap(alone, alone.new.parameters(), Dense(), comm, **options)
    train(model, optimizer, comm, range(4, 10))
    train(alone, other, comm, range(4, 10))
    assert torch.equal(values(model.new), values(alone.new))
    assert same_on_all_ranks(model, comm)


def test_an_outer_optimizer_of_several_groups_is_given_new_parameters_by_its_owner(comm: Communicator) -> None:
    model = Branches()
    outer = torch.optim.SGD([{"params": part.parameters()} for part in model.old if len(list(part.parameters()))], lr=1)
    optimizer = wrap(model, model.old.parameters(), Dense(), comm, synchronize="updates", outer=outer)
    train(model, optimizer, comm, range(2))
    with pytest.raises(ValueError, match=r"the outer SGD has several parameter groups, none of which has 'new\.0\.wei"):
        add(model, optimizer)
    optimizer.outer.add_param_group({"params": model.new.parameters()})
    add(model, optimizer)
    train(model, optimizer, comm, range(2, 5))
    assert same_on_all_ranks(model, comm)


@pytest.mark.parametrize("change", ["added or unfrozen", "frozen while the optimizer trains"])
def test_parameters_stay_as_they_are_where_means_come_late(change: str, comm: Communicator) -> None:
    model = Branches()
    model.new.requires_grad_(False)
    optimizer = wrap(model, model.parameters(), Dense(), comm, synchronize="updates", local_steps=2, delay=1)
    train(model, optimizer, comm, range(4))
    (model.new if change.startswith("added") else model.old)[0].weight.requires_grad_(change.startswith("added"))
    with pytest.raises(ValueError, match=rf"'\w+\.0\.weight' was {change}, which delay= and blend= do not allow"):
        train(model, optimizer, comm, range(4, 8))  # the ranks agree where a mean is applied
