"""More calls in flight than the progress thread drives at once."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from tests.mpi.lanes import TIMEOUT_S

MANY = 200


@pytest.mark.mpi(min_size=2)
def test_calls_that_wait_for_another_communicator_do_not_hold_up_its_calls(mpi_comm: MPI.Comm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as first, Communicator(mpi_comm, timeout=TIMEOUT_S) as second:
        assert first.start_progress_thread()
        assert second.start_progress_thread()
        x = np.ones(3)
        early = [first.iallreduce(x) for _ in range(MANY)] if mpi_comm.rank == 0 else []
        sums = [handle.wait() for handle in [second.iallreduce(k * x) for k in range(MANY)]]
        early = early or [first.iallreduce(x) for _ in range(MANY)]
        assert [total[0] for total in sums] == [k * mpi_comm.size for k in range(MANY)]
        assert all((handle.wait() == mpi_comm.size).all() for handle in early)
