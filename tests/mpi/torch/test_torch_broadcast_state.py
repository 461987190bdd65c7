"""One rank's optimizer state for all ranks: all go on from it, or raise an error with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from collectives import CollectiveMismatch, Communicator
from mpicomp import Dense
from mpicomp.torch import broadcast_optimizer_state, broadcast_parameters
from tests.mpi.lanes import few_ranks, three_ranks
from tests.mpi.torch.training import batch, make_model, parameters_of, wrap

pytestmark = few_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """The same batches on every rank, and a schedule."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for seed in seeds:
        inputs, labels = batch(seed, next(model.parameters()).dtype)

        def loss(inputs: Any = inputs, labels: Any = labels) -> Any:
            optimizer.zero_grad()
            value = nn.functional.cross_entropy(model(inputs), labels)
            value.backward()
            return value

        optimizer.step(loss)
        schedule.step()


@three_ranks
@pytest.mark.parametrize("others", [0, 2], ids=["empty", "another"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_all_ranks_go_on_as_the_root_would(comm: Communicator, kind: str, dtype: torch.dtype, others: int) -> None:
    root = comm.size - 1
    model = make_model(dtype=dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    steps(model, optimizer, range(4) if comm.rank == root else range(50, 50 + others))
    alone = copy.deepcopy((model, optimizer.state_dict()))
    broadcast_parameters(model, comm, root)
    broadcast_optimizer_state(optimizer, comm, root)
    assert len(set(comm.allgather_object(str(optimizer.state_dict())))) == 1
    if comm.rank == root:
        assert str(optimizer.state_dict()) == str(alone[1])
    steps(model, optimizer, range(4, 8))
    if comm.rank == root:
        undisturbed = OPTIMIZERS[kind](alone[0].parameters())
        undisturbed.load_state_dict(alone[1])
        steps(alone[0], undisturbed, range(4, 8))
        assert torch.equal(parameters_of(alone[0]), parameters_of(model))
    vectors = comm.allgather_object(parameters_of(model))
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)


def test_a_distributed_optimizer_is_refused_with_the_cure(comm: Communicator) -> None:
    optimizer = wrap(make_model(), Dense(), comm)
    with pytest.raises(TypeError, match=rf"rank {comm.rank} of .* residuals of its own; .*load_state_dict\(\)"):
        broadcast_optimizer_state(optimizer, comm)
    broadcast_optimizer_state(optimizer.optimizer, comm)


@pytest.mark.mpi(min_size=2)
def test_other_parameters_are_a_mismatch(comm: Communicator) -> None:
    model = nn.Linear(3, 2) if comm.rank else nn.Linear(2, 3)
    with pytest.raises(CollectiveMismatch, match="rank 0: 2 tensors of 9 elements"):
        broadcast_optimizer_state(torch.optim.SGD(model.parameters()), comm)


class Picky(torch.optim.SGD):
    """Optimizer that refuses a state once, on request."""

    refuses = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.refuses:
            self.refuses = False
            raise KeyError("not mine")
        super().load_state_dict(state_dict)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", [0, 1])
def test_where_one_rank_does_not_take_the_state_none_does(comm: Communicator, odd: int) -> None:
    model = make_model()
    optimizer = Picky(model.parameters(), lr=0.1, momentum=0.9)
    if comm.rank == 0:
        steps(model, optimizer, range(1))
    optimizer.refuses = comm.rank == odd
    told = (
        f"rank {odd} of .*, broadcast_optimizer_state: Picky does not take the state .KeyError: 'not mine'.; build it"
    )
    with pytest.raises(ValueError if comm.rank == odd else CollectiveMismatch, match=told):
        broadcast_optimizer_state(optimizer, comm)
    assert bool(optimizer.state) == (comm.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_a_state_that_cannot_travel_is_told_on_every_rank(comm: Communicator) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    culprit = comm.rank == 0
    weight = optimizer.param_groups[0]["params"][0]
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: None, TypeError, "a dict cannot be pickled"),
        (torch.zeros(2, device="meta"), ValueError, r"lives on meta"),
        (torch.eye(2).to_sparse(), ValueError, "is a torch.sparse_coo tensor; make it dense"),
    ]
    for entry, error, told in cases:
        if culprit:
            optimizer.state[weight] = {"entry": entry}
        with pytest.raises(error if culprit else CollectiveMismatch, match=f"rank 0 of {comm.size}, .*{told}"):
            broadcast_optimizer_state(optimizer, comm)
    comm.barrier()
