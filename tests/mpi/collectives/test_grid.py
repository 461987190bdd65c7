"""Grids of ranks: who is where, who shares a line with whom, and grids that do not fit."""

from __future__ import annotations

import pytest

from collectives import CollectiveMismatch, Communicator

SHAPES = {1: (1, 1), 2: (2, 1), 3: (1, 3), 4: (2, 2), 5: (5, 1), 7: (1, 7), 8: (2, 4)}


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
