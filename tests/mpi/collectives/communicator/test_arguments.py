"""Communicators of MPI that a communicator cannot be made of."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives import Communicator
from tests.mpi.lanes import TIMEOUT_S


@pytest.mark.mpi(min_size=2)
def test_an_inter_communicator_is_refused_and_its_merged_group_accepted(mpi_comm: MPI.Intracomm) -> None:
    half = mpi_comm.Create_group(mpi_comm.group.Incl(range(mpi_comm.rank % 2, mpi_comm.size, 2)))
    both = half.Create_intercomm(0, mpi_comm, 1 - mpi_comm.rank % 2)
    with pytest.raises(ValueError, match=r"is an inter-communicator between two groups: pass mpi_comm\.Merge\(\)"):
        Communicator(both, timeout=TIMEOUT_S)
    merged = both.Merge()
    with Communicator(merged, timeout=TIMEOUT_S) as comm:
        assert comm.allreduce(1) == mpi_comm.size
    for one in (merged, both, half):
        one.Free()
