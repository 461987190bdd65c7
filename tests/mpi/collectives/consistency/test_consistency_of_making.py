"""Communicators that some ranks do not make."""

from __future__ import annotations

import time

import pytest
from mpi4py import MPI

from collectives import CollectiveMismatch, CollectiveTimeout, Communicator
from tests.mpi.lanes import TIMEOUT_S

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_rank_that_does_not_come_is_named(mpi_comm: MPI.Intracomm) -> None:
    last = mpi_comm.size - 1
    if mpi_comm.rank < last:
        told = f"^rank {mpi_comm.rank} of .*: not all ranks make a communicator, nothing from rank {last} .* after"
        with pytest.raises(CollectiveTimeout, match=told):
            Communicator(mpi_comm, arrival_timeout=0.3)
    mpi_comm.Barrier()


def test_a_rank_that_comes_late_is_waited_for(mpi_comm: MPI.Intracomm) -> None:
    time.sleep(1.5 if mpi_comm.rank == 0 else 0)
    with Communicator(mpi_comm, timeout=1.0, arrival_timeout=TIMEOUT_S) as comm:
        assert (comm.rank, comm.size) == (mpi_comm.rank, mpi_comm.size)


def test_a_rank_whose_argument_is_wrong_says_so_and_the_others_do_not_wait_for_it(mpi_comm: MPI.Intracomm) -> None:
    start = time.monotonic()
    odd = mpi_comm.size - 1
    mine = mpi_comm.rank == odd
    error, told = (ValueError, "did you mean 'ring'") if mine else (CollectiveMismatch, f"rank {odd} made no")
    with pytest.raises(error, match=f"rank {mpi_comm.rank} of {odd + 1}: .*{told}"):
        Communicator(mpi_comm, "rign" if mine else "ring")
    assert time.monotonic() - start < TIMEOUT_S / 2
    Communicator(mpi_comm).close()
