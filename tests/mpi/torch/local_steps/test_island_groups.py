"""Islands that are process groups of PyTorch: Gloo's here, in the place of NCCL's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from collectives import Communicator
from collectives.errors import CollectiveMismatch, PeerFailure
from collectives.nodes.layout import NodeLayout
from mpicomp import Dense, Marsit, Relay
from mpicomp.algorithms.per_island import Islands
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.local_steps.island_groups import IslandGroup
from mpicomp.torch.parameters import NamedParameter
from tests.mpi.lanes import up_to_four_ranks
from tests.mpi.torch.ddp.hooked_models import process_group
from tests.mpi.torch.training import make_model, parameters_of, same_on_all_ranks, train, wrap

pytestmark = up_to_four_ranks

LOCAL: dict[str, Any] = {"synchronize": "updates", "local_steps": 2}


@pytest.fixture(autouse=True)
def _group(mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    with process_group(mpi_comm, folder):
        yield


def everyone() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def pairs(comm: Communicator) -> dist.ProcessGroup:
    """Return the group of this rank, of two neighbours; the last may be smaller."""
    groups = [dist.new_group([*range(first, min(first + 2, comm.size))]) for first in range(0, comm.size, 2)]
    found = groups[comm.rank // 2]
    assert isinstance(found, dist.ProcessGroup)
    return found


@pytest.mark.parametrize("plan", [{}, {"local_steps": 4, "fragments": 2, "delay": 1}], ids=str)
@pytest.mark.parametrize("algorithm", [Dense(), Marsit(10), Relay()], ids=str)
def test_training_is_that_of_islands_by_messages(algorithm: Any, plan: dict[str, int], comm: Communicator) -> None:
    """A sum of two ranks has one order, so that the bits are equal."""
    by_messages, by_group = make_model(), make_model()
    with comm.split(comm.rank // 2) as island:
        for model, islands in ((by_messages, island), (by_group, pairs(comm))):
            optimizer = wrap(model, algorithm, comm, outer=(0.7, 0.6), islands=islands, **LOCAL | plan)
            train(model, optimizer, comm, range(9))
            assert same_on_all_ranks(model, island)
    assert torch.equal(parameters_of(by_group), parameters_of(by_messages))


def test_a_dimension_of_a_mesh_is_an_island(comm: Communicator) -> None:
    whole = DeviceMesh("cpu", torch.arange(comm.size).reshape(1, -1), mesh_dim_names=("node", "gpu"))
    model, other = make_model(), make_model()
    for one, islands in ((model, whole["gpu"]), (other, everyone())):
        train(one, wrap(one, Relay(), comm, islands=islands, **LOCAL), comm, range(4))
    assert torch.equal(parameters_of(model), parameters_of(other))
    with pytest.raises(ValueError, match=r"a mesh of 2 dimensions: pass one of them, such as mesh\['gpu'\]"):
        wrap(model, Relay(), comm, islands=whole, **LOCAL)


def test_infinities_cross_an_island(comm: Communicator) -> None:
    """A GradScaler looks for them in the means."""
    model = nn.Linear(2, 1)
    group = IslandGroup(everyone(), comm, [NamedParameter("weight", model.weight)])
    mean = group.average(torch.tensor([float("inf") if comm.rank == comm.size - 1 else 1.0, 1.0 + comm.rank]))
    assert mean.tolist() == [float("inf"), (comm.size + 1) / 2]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_a_group_of_other_ranks_is_refused_on_all_ranks(comm: Communicator) -> None:
    first, others = dist.new_group([0]), dist.new_group([*range(1, comm.size)])
    with pytest.raises((ValueError, CollectiveMismatch), match="islands is a process group without this rank: pass"):
        wrap(make_model(), Dense(), comm, islands=others if comm.rank == 0 else first, **LOCAL)
    overlapping = first if comm.rank == 0 else everyone()
    with pytest.raises(ValueError, match=r"the island of rank 1 is another process group than that of rank 0, which"):
        wrap(make_model(), Dense(), comm, islands=overlapping, **LOCAL)
    twice = [dist.new_group([*range(comm.size)]) for _ in range(2)]
    with pytest.raises(ValueError, match=r"the island of rank 0 is another process group than that of rank"):
        wrap(make_model(), Dense(), comm, islands=twice[min(comm.rank, 1)], **LOCAL)
    with comm.split(comm.rank) as alone, pytest.raises(ValueError, match="the island of rank 0 has rank"):
        wrap(make_model(), Dense(), alone, islands=everyone(), **LOCAL)
    with pytest.raises(CollectiveMismatch, match="islands=process group"):
        wrap(make_model(), Dense(), comm, islands=comm if comm.rank else everyone(), **LOCAL)


@pytest.mark.mpi(min_size=3)
def test_groups_that_overlap_in_a_ring_are_refused(comm: Communicator) -> None:
    """All have two ranks, and each of ranks 0 and 1 is in that of another one."""
    groups = [dist.new_group(ranks) for ranks in ([0, comm.size - 1], [0, 1], *([one] for one in range(2, comm.size)))]
    with pytest.raises(ValueError, match=r"the island of rank 0 is another process group than that of rank"):
        wrap(make_model(), Dense(), comm, islands=groups[comm.rank], **LOCAL)


@pytest.mark.mpi(min_size=2)
def test_a_mesh_without_this_rank_is_refused_on_all_ranks(comm: Communicator) -> None:
    first, others = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [*range(1, comm.size)])
    with pytest.raises((ValueError, CollectiveMismatch), match="islands is a mesh without this rank: pass one of"):
        wrap(make_model(), Dense(), comm, islands=others if comm.rank == 0 else first, **LOCAL)


def test_a_destroyed_group_is_refused(comm: Communicator) -> None:
    group = dist.new_group([*range(comm.size)])
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="islands is a process group that was destroyed, or never registered: pass"):
        wrap(make_model(), Dense(), comm, islands=group, **LOCAL)


@pytest.mark.mpi(min_size=2)
def test_process_groups_of_single_nodes_are_refused(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks are rank 0, as by torchrun --standalone on each node."""
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    with pytest.raises(ValueError, match=r"several ranks have one number in torch\.distributed, as in process groups"):
        wrap(make_model(), Dense(), comm, islands=everyone(), **LOCAL)


def test_ranks_that_regroup_keep_no_process_group(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "recovery", SimpleNamespace(newcomers=None))
    with pytest.raises(ValueError, match="does not outlive its ranks: with on_failure='regroup' pass"):
        IslandGroup(everyone(), comm, [])


def test_a_communicator_that_does_not_verify_is_refused(mpi_comm: MPI.Intracomm) -> None:
    with (
        Communicator(mpi_comm, verify=False) as comm,
        pytest.raises(ValueError, match="which waits for ranks that differ: leave out verify=False"),
    ):
        IslandGroup(everyone(), comm, [])


def test_a_group_without_a_backend_for_the_parameters_is_refused(comm: Communicator) -> None:
    on_device = NamedParameter("weight", nn.Parameter(torch.zeros(2, device="meta")))
    with pytest.raises(ValueError, match=r"without a backend for meta, where parameters are: make it by init_process"):
        IslandGroup(everyone(), comm, [on_device])


@pytest.mark.mpi(min_size=2)
def test_an_error_before_the_mean_is_raised_on_all_ranks_of_the_island(comm: Communicator) -> None:
    """Others would wait in the process group for minutes."""
    embedding = nn.Embedding(7, 3, sparse=comm.rank == 0)
    nn.init.zeros_(embedding.weight)
    sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(sgd, Dense(), comm, islands=everyone(), **LOCAL)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(CollectiveMismatch if comm.rank else ValueError, match="sparse, which islands do not average"):
        optimizer.step()


def test_a_failure_of_the_group_names_the_rank(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(flat: torch.Tensor, group: object) -> None:
        raise RuntimeError("Connection closed by peer")

    group = IslandGroup(everyone(), comm, [])
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(PeerFailure, match=rf"rank {comm.rank} of \d, averaging gradients within an island: Connection"):
        group.average(torch.zeros(1))
    monkeypatch.setattr(dist, "all_reduce", raise_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        group.average(torch.zeros(1))


def raise_out_of_memory(flat: torch.Tensor, group: object) -> None:
    raise torch.OutOfMemoryError


# NCCL -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "hosts", "way"),
    [("nccl", [0, 0, 1, 1], "nccl"), ("gloo", [0, 0, 1, 1], "auto"), ("nccl", [0, 1, 2, 2], "auto")],
)
def test_nccl_carries_updates_too_within_a_host(
    backend: str, hosts: list[int], way: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(self: IslandGroup, device: torch.device) -> str:
        return backend

    monkeypatch.setattr(IslandGroup, "_backend_at", named)
    group = IslandGroup(everyone(), comm, [NamedParameter("weight", nn.Parameter(torch.zeros(2)))])
    group.open(comm)
    four: Any = SimpleNamespace(hosts=NodeLayout.of_keys(hosts, 0))
    assert group.way_of(four, Islands(NodeLayout.of_keys([0, 0, 1, 1], 0), (0, 1, 2, 3))) == way
