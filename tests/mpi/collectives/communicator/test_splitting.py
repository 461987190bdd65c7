"""Groups by colour and on grids: their ranks, inherited options, and groups that cannot be made."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, Communicator, CommunicatorClosed, Ring, TopologyError, Torus
from tests.mpi.lanes import TIMEOUT_S, few_ranks

SHAPES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (5, 1), 7: (1, 7), 8: (2, 4)}


def test_ranks_of_a_colour_make_a_group_in_the_order_of_their_keys(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    members = [rank for rank in reversed(range(comm.size)) if rank % 2 == comm.rank % 2]
    with group:
        assert (group.rank, group.size) == (members.index(comm.rank), len(members))
        assert group.allgather_object(comm.rank) == members
        assert group.allreduce(np.full(1000, comm.rank))[0] == sum(members)
        assert comm.allreduce(1) == comm.size


def test_no_colour_means_no_group(comm: Communicator) -> None:
    group = comm.split(None if comm.rank == 0 else 7)
    assert (group is None) == (comm.rank == 0)
    if group is not None:
        assert group.allreduce(1) == comm.size - 1
        group.close()
    assert comm.split(None) is None


def test_a_group_has_the_options_of_its_parent(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, verify=False, piece_bytes=4096) as comm:
        group = comm.split(0)
        other = comm.split(0, topology="tree")
    assert group is not None
    assert other is not None
    with group, other:
        assert (group.topology, group.timeout, group.options.piece_bytes) == (Ring(), TIMEOUT_S, 4096)
        assert group.verifies is False
        assert other.topology.name == "tree"


def test_making_a_group_installs_no_abort_hook(mpi_comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bool] = []
    monkeypatch.setattr("collectives.communicator.arguments.install_unless_attended", lambda: installed.append(True))
    with Communicator(mpi_comm, timeout=TIMEOUT_S, abort_hook=False) as comm:
        group = comm.split(0)
    assert group is not None
    group.close()
    assert not installed


def test_a_group_outlives_its_parent(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    group = comm.split(0)
    assert group is not None
    comm.close()
    with pytest.raises(CommunicatorClosed):
        comm.split(0)
    with group:
        assert group.allreduce(np.ones(5000))[0] == group.size


@pytest.mark.mpi(min_size=4, max_size=4)
def test_a_topology_that_does_not_fit_is_refused_in_its_group_alone(mpi_comm: MPI.Intracomm) -> None:
    with Communicator(mpi_comm, Torus(2, 2), TIMEOUT_S) as comm:
        color = int(comm.rank == 3)
        told = rf"rank {comm.rank} of 4, split\(color={color}\): .*; pass another topology"
        with pytest.raises(TopologyError, match=told):
            comm.split(color)
        group = comm.split(color, topology="auto" if color else Torus(1, 3))
        assert group is not None
        with group:
            assert group.allreduce(1) == (1 if color else 3)


@few_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("color", "key", "error", "told"),
    [
        (-1, 0, ValueError, "color must lie in 0"),
        (2**31, 0, ValueError, "color must lie in 0"),
        ("red", 0, TypeError, "color must be an integer, not 'red'"),
        (0, 2**40, ValueError, "key must lie in"),
        (0, None, TypeError, "key must be an integer, not None"),
    ],
)
def test_a_colour_that_is_none_is_told_on_every_rank(
    comm: Communicator, color: int, key: int, error: type[Exception], told: str
) -> None:
    culprit = comm.rank == 0
    with pytest.raises(error if culprit else CollectiveMismatch, match=rf"rank 0 of {comm.size}, split\(\): {told}"):
        comm.split(color if culprit else 0, key if culprit else 0)
    assert comm.allreduce(1) == comm.size


def test_a_group_is_split_while_calls_are_in_flight(comm: Communicator) -> None:
    handle = comm.iallreduce(np.ones(50_000))
    group = comm.split(comm.rank // 2)
    assert group is not None
    inner = group.split(0)
    assert inner is not None
    with group, inner:
        assert inner.allreduce(1) == group.size
        assert (handle.wait() == comm.size).all()


def test_calls_that_the_progress_thread_drives_are_the_same(comm: Communicator) -> None:
    if not comm.start_progress_thread():
        pytest.skip("MPI runs without threads")
    assert comm.allreduce(comm.rank, "max") == comm.size - 1
    assert comm.allgather(np.full(comm.rank, comm.rank)).size == sum(range(comm.size))
    assert comm.allgather_object(comm.rank) == [*range(comm.size)]
    group = comm.split(0)
    assert group is not None
    with group:
        assert group.broadcast_object(group.rank, group.size - 1) == comm.size - 1


def test_ranks_of_a_node_are_counted(comm: Communicator) -> None:
    node = comm.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert (comm.local_rank, comm.local_size) == (node.rank, node.size)
    node.Free()


# Grids --------------------------------------------------------------------------------------------------------------


def test_each_axis_has_the_ranks_that_differ_in_it_alone(comm: Communicator) -> None:
    replicas, stages = SHAPES[comm.size]
    with comm.grid(replica=replicas, stage=stages) as grid:
        replica, stage = divmod(comm.rank, stages)
        assert grid.shape == {"replica": replicas, "stage": stages}
        assert grid.coordinates == {"replica": replica, "stage": stage}
        line, column = grid.along("stage"), grid.along("replica")
        assert (line.rank, line.size) == (stage, stages)
        assert (column.rank, column.size) == (replica, replicas)
        assert line.allgather_object(comm.rank) == [replica * stages + i for i in range(stages)]
        assert column.allgather_object(comm.rank) == [i * stages + stage for i in range(replicas)]
    assert comm.allreduce(1) == comm.size


@pytest.mark.parametrize("shape", [{}, {"stage": 0}, {"replica": 2, "stage": 9}])
def test_a_grid_that_does_not_fit_is_refused_on_all_ranks(comm: Communicator, shape: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"rank {comm.rank} of {comm.size}: .*grid"):
        comm.grid(**shape)
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_grids_are_told(comm: Communicator) -> None:
    shape = {"stage": comm.size} if comm.rank else {"replica": comm.size}
    with pytest.raises(CollectiveMismatch, match="grid"):
        comm.grid(**shape)
