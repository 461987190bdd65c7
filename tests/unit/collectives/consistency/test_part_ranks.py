"""Ranks of a part are those that MPI has given to it."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives import Communicator, DamagedMessage
from collectives.consistency.part_ranks import ranks_in, require_ranks
from collectives.threads.run_local import run_local


def test_ranks_of_a_part_of_threads_are_in_its_order() -> None:
    def work(comm: Communicator) -> list[int]:
        with comm.split(comm.rank % 2, -comm.rank) as part:
            return ranks_in(comm.mpi_comm, part.mpi_comm)

    assert run_local(5, work) == [[4, 2, 0], [3, 1], [4, 2, 0], [3, 1], [4, 2, 0]]


def test_a_part_of_mpi_is_compared() -> None:
    part = MPI.COMM_SELF.Dup()
    require_ranks(MPI.COMM_WORLD, part, [0])
    with pytest.raises(DamagedMessage, match="rank 0 of 1: MPI has made a group of rank 0 and not of rank 1, as if"):
        require_ranks(MPI.COMM_WORLD, part, [1])
    part.Free()
