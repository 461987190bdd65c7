"""Parameters that are added, unfrozen or frozen while an optimizer trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch, NonFiniteGradient
from mpicomp import Dense, DoubleSqueeze, LocalTopK, Marsit, MemSGD
from mpicomp.torch import DistributedOptimizer, broadcast_parameters
from tests.mpi.lanes import same_text_on, up_to_four_ranks
from tests.mpi.torch.training import batch, same_on_all_ranks

pytestmark = up_to_four_ranks

GRADIENTS: dict[str, Any] = {"synchronize": "gradients"}
IN_TURN: dict[str, Any] = {"synchronize": "gradients", "overlap": False}
UPDATES: dict[str, Any] = {"synchronize": "updates"}
FUSED: dict[str, Any] = {"synchronize": "updates", "overlap": True}
modes = pytest.mark.parametrize(
    "options", [GRADIENTS, IN_TURN, UPDATES, FUSED], ids=["gradients", "in-turn", "updates", "fused"]
)
WIDTH = 24
ADDED_AT, END = 3, 7


class Branches(nn.Module):
    """Two branches whose losses are added, so that the gradients of one do not depend on the other."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.old = nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.new = nn.Sequential(nn.Linear(10, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        self.to(dtype)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return sum(nn.functional.cross_entropy(branch(inputs), labels) for branch in (self.old, self.new))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def wrap(model: nn.Module, parameters: Any, algorithm: Any, comm: Communicator, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(sgd(parameters), algorithm, comm, model.named_parameters(), bucket_mb=0.001, **options)


def backward(model: Branches, optimizer: torch.optim.Optimizer, comm: Communicator, step: int) -> None:
    inputs, labels = batch(1000 * comm.rank + step, next(model.parameters()).dtype)
    optimizer.zero_grad()
    model.loss(inputs, labels).backward()


def train(model: Branches, optimizer: torch.optim.Optimizer, comm: Communicator, steps: range) -> None:
    for step in steps:
        backward(model, optimizer, comm, step)
        optimizer.step()


def values(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def add(model: Branches, optimizer: DistributedOptimizer) -> None:
    optimizer.add_param_group({"params": list(model.new.parameters())})


def unfreeze(model: Branches, optimizer: DistributedOptimizer) -> None:
    model.new.requires_grad_(True)


def started(
    how: Callable[..., None], algorithm: Any, comm: Communicator, **options: Any
) -> tuple[Branches, DistributedOptimizer]:
    """Return a model of which the old branch is trained, and its optimizer, to which `how` adds the new one."""
    model = Branches(options.pop("dtype", torch.float32))
    model.new.requires_grad_(how is add)
    optimizer = wrap(model, (model.old if how is add else model).parameters(), algorithm, comm, **options)
    return model, optimizer


ways = pytest.mark.parametrize("how", [add, unfreeze])


# Joining -------------------------------------------------------------------------------------------------------------


@modes
@ways
@pytest.mark.parametrize("algorithm", [Dense(), LocalTopK(4), Marsit(3)], ids=str)
def test_old_parameters_go_the_way_that_they_go_without_new_ones(
    algorithm: Any, how: Callable[..., None], options: dict[str, Any], comm: Communicator
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
    assert len(optimizer.param_groups) == 4


def test_vectors_of_new_parameters_have_random_numbers_of_their_own(comm: Communicator) -> None:
    """Two bucket of equal values, one added, are encoded differently by a method that draws signs."""
    same = [nn.Parameter(torch.zeros(64)) for _ in range(2)]
    inner = torch.optim.SGD(same[:1], lr=1.0)
    optimizer = DistributedOptimizer(inner, Marsit(), comm)
    generator = torch.Generator().manual_seed(comm.rank)
    for step in range(6):
        if step == 1:
            optimizer.add_param_group({"params": same[1:]})
        gradient = torch.randn(64, generator=generator)
        for one in same:
            one.grad = gradient.clone()
        optimizer.step()
        if step == 0:
            same[1].data.copy_(same[0].data)
    assert (torch.equal(*same)) == (comm.size == 1)


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


# Errors --------------------------------------------------------------------------------------------------------------


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
