"""A failure on one rank is a failure of all, told in one sentence."""

from __future__ import annotations

import pytest

from apps.train.agreement import JobError, any_rank, raise_on_all_ranks
from collectives import Communicator


def fail(comm: Communicator, error: Exception | None) -> None:
    with raise_on_all_ranks(comm):
        if error is not None:
            raise error


def test_one_ranks_failure_is_every_ranks(comm: Communicator) -> None:
    last = comm.size - 1
    error = ValueError("no such folder; make it") if comm.rank == last else None
    with pytest.raises(JobError, match=rf"^rank {last} of {comm.size}: no such folder; make it$"):
        fail(comm, error)


@pytest.mark.mpi(min_size=2)
def test_of_several_failures_the_lowest_ranks_is_told(comm: Communicator) -> None:
    with pytest.raises(JobError, match=r"^rank 1 of"):
        fail(comm, OSError("disk full") if comm.rank >= 1 else None)


def test_a_block_that_succeeds_everywhere_goes_on(comm: Communicator) -> None:
    with raise_on_all_ranks(comm):
        done = True
    assert done


def test_any_rank_tells_all_ranks_the_same(comm: Communicator) -> None:
    assert any_rank(comm, comm.rank == comm.size - 1)
    assert not any_rank(comm, False)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("no such\nfolder \udcff"), r"no such folder \\udcff"),
        (MemoryError(), "out of memory"),
    ],
)
def test_an_error_is_one_line_that_every_rank_can_be_sent(comm: Communicator, error: Exception, told: str) -> None:
    with pytest.raises(JobError, match=rf"^rank 0 of {comm.size}: {told}$"):
        fail(comm, error if comm.rank == 0 else None)
