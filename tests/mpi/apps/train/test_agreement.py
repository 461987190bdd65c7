"""A failure on one rank is a failure of all, with one sentence."""

from __future__ import annotations

import pytest

from apps.train.agreement import JobError, any_rank, raise_on_all_ranks
from collectives import Communicator


def fail(comm: Communicator, error: Exception | None) -> None:
    with raise_on_all_ranks(comm):
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("lowest", "error", "told"),
    [
        (1, OSError("disk full"), "disk full"),
        (7, ValueError("no such folder; make it"), "no such folder; make it"),
        (0, OSError("no such\nfolder \udcff"), r"no such folder \\udcff"),  # in one line that can be sent
        (0, MemoryError(), "out of memory"),
    ],
)
def test_of_all_failures_that_of_the_lowest_rank_is_every_ranks(
    comm: Communicator, lowest: int, error: Exception, told: str
) -> None:
    lowest = min(lowest, comm.size - 1)
    with pytest.raises(JobError, match=rf"^rank {lowest} of {comm.size}: {told}$"):
        fail(comm, error if comm.rank >= lowest else None)


def test_a_block_that_succeeds_everywhere_goes_on(comm: Communicator) -> None:
    with raise_on_all_ranks(comm):
        done = True
    assert done


def test_any_rank_tells_all_ranks_the_same(comm: Communicator) -> None:
    assert any_rank(comm, comm.rank == comm.size - 1)
    assert not any_rank(comm, False)
