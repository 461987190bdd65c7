"""Models made equal, and told when they are not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from collectives import Communicator
from collectives.errors import CollectiveMismatch
from mpicomp import Dense
from mpicomp.torch import average_buffers, broadcast_parameters
from tests.mpi.torch.training import make_model, on_all_ranks, parameters_of, train, wrap


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("root", [0, 1])
def test_broadcast_copies_parameters_and_buffers_of_any_dtype(comm: Communicator, root: int) -> None:
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2, dtype=torch.bfloat16))
    model[1].num_batches_tracked.fill_(comm.rank)
    model[1].running_mean.copy_(torch.randn(5))
    broadcast_parameters(model, comm, root)
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    vectors = on_all_ranks(torch.cat([tensor.flatten() for tensor in state.values()]), comm)
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    assert state["1.num_batches_tracked"] == root


@pytest.mark.mpi(min_size=2)
def test_broadcast_takes_a_state_dict_and_any_strides(comm: Communicator) -> None:
    tensor = torch.full((3, 2), float(comm.rank)).t()
    broadcast_parameters({"a": tensor, "nothing": torch.zeros(0), "flag": torch.tensor(True)}, comm, root=1)
    assert torch.equal(tensor, torch.ones(2, 3))


@pytest.mark.mpi(min_size=2)
def test_broadcast_between_different_models_is_refused_on_every_rank(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatch, match=r"rank 0: 2 tensors of 8 elements"):
        broadcast_parameters(nn.Linear(3, 2) if comm.rank == 0 else nn.Linear(2, 2), comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("entry", "message"),
    [(3, "'a' is a int"), (torch.zeros(2, device="meta"), "'a' lives on meta")],
    ids=["type", "device"],
)
def test_what_one_rank_cannot_broadcast_is_told_on_every_rank(comm: Communicator, entry: object, message: str) -> None:
    mine = entry if comm.rank == 1 else torch.zeros(2)
    expected = (TypeError, ValueError) if comm.rank == 1 else CollectiveMismatch
    with pytest.raises(expected, match=rf"rank 1 of {comm.size}, broadcast_parameters: .*{message}"):
        broadcast_parameters({"a": mine}, comm)  # type: ignore[dict-item]
    comm.barrier()


def test_average_buffers_averages_floats_and_leaves_counts(comm: Communicator) -> None:
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(comm.rank)
    norm.running_var.fill_(2 * comm.rank)
    norm.num_batches_tracked.fill_(comm.rank)
    average_buffers(norm, comm)
    torch.testing.assert_close(norm.running_mean, torch.full((4,), (comm.size - 1) / 2))
    torch.testing.assert_close(norm.running_var, torch.full((4,), float(comm.size - 1)))
    assert norm.num_batches_tracked == comm.rank


@pytest.mark.mpi(min_size=2)
def test_a_forgotten_broadcast_is_told_at_the_first_step(comm: Communicator) -> None:
    model = make_model(seed=comm.rank)
    optimizer = wrap(model, Dense(), comm)
    with pytest.raises(CollectiveMismatch, match=r"broadcast_parameters\(model, comm\)"):
        train(model, optimizer, comm, range(1))
    broadcast_parameters(model, comm)
    train(model, optimizer, comm, range(1))
    assert torch.equal(*on_all_ranks(parameters_of(model), comm)[:2])


@pytest.mark.mpi(min_size=2)
def test_wrapping_different_models_is_refused_on_every_rank(comm: Communicator) -> None:
    model = nn.Linear(3, 2) if comm.rank else nn.Linear(2, 3)
    with pytest.raises(CollectiveMismatch, match="ranks differ"):
        wrap(model, Dense(), comm)
