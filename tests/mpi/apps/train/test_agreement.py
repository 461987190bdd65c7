"""A failure on one rank is a failure of all, told in one sentence."""

from __future__ import annotations

import numpy as np
import pytest

from apps.train.agreement import JobError, any_rank, gather, together
from collectives import Communicator


def fail_together(comm: Communicator, error: Exception | None) -> None:
    with together(comm):
        if error is not None:
            raise error


def test_one_ranks_failure_is_every_ranks(comm: Communicator) -> None:
    last = comm.size - 1
    error = ValueError("no such folder; make it") if comm.rank == last else None
    with pytest.raises(JobError, match=rf"^rank {last} of {comm.size}: no such folder; make it$"):
        fail_together(comm, error)


@pytest.mark.mpi(min_size=2)
def test_of_several_failures_the_lowest_ranks_is_told(comm: Communicator) -> None:
    with pytest.raises(JobError, match=r"^rank 1 of"):
        fail_together(comm, OSError("disk full") if comm.rank >= 1 else None)


def test_a_block_that_succeeds_everywhere_goes_on(comm: Communicator) -> None:
    with together(comm):
        done = True
    assert done


def test_any_rank_and_gather_tell_all_ranks_the_same(comm: Communicator) -> None:
    assert any_rank(comm, comm.rank == comm.size - 1)
    assert not any_rank(comm, False)
    rows = gather(comm, [comm.rank, 2**32 - 1])
    np.testing.assert_array_equal(rows, [[rank, 2**32 - 1] for rank in range(comm.size)])
