"""Tags of messages: no user takes the messages of another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, tags
from collectives.consistency import call_check
from collectives.consistency.missing_ranks import TAG as TAG_OF_MISSING
from collectives.process_end import MEETING_TAG
from collectives.trace.clocks import TAG as TAG_OF_CLOCKS
from mpicomp import run_local

RANGES = [one for one in vars(tags).values() if isinstance(one, range)]


def test_the_ranges_of_all_users_are_disjoint_and_have_tags_of_every_mpi_library() -> None:
    ordered = sorted(RANGES, key=lambda one: one.start)
    assert len(ordered) == 8
    assert all(first.stop <= second.start for first, second in pairwise(ordered))
    assert ordered[0].start >= 0
    assert ordered[-1].stop - 1 <= 32_767


def test_users_have_as_many_tags_as_they_take() -> None:
    checks = range(call_check.TAG, call_check.TAG + call_check.AT_ONCE + 1)
    assert checks == tags.CHECKS_OF_CALLS
    assert range(call_check.TEXT_TAG, call_check.TEXT_TAG + call_check.AT_ONCE) == tags.DESCRIPTIONS_OF_CALLS
    assert len(tags.BETWEEN_TWO_RANKS) - 1 == 2 * tags.LARGEST_OF_USERS + 1
    assert [one.start for one in (tags.ABOUT_MISSING_RANKS, tags.CLOCKS, tags.END_OF_PROGRAM)] == [
        TAG_OF_MISSING,
        TAG_OF_CLOCKS,
        MEETING_TAG,
    ]


def test_tags_of_long_lived_users_and_single_calls_go_round() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        for give, expected in ((comm.fixed_tag, tags.OF_LONG_LIVED_USERS), (comm.calls.next_tag, tags.OF_SINGLE_CALLS)):
            assert {give() for _ in range(2 * len(expected))} == set(expected)


@pytest.mark.parametrize("tag", [0, 50, 52, 100, 300])
def test_a_barrier_leaves_messages_of_any_tag_to_their_receiver(tag: int) -> None:
    def work(comm: Communicator) -> list[int]:
        sending = comm.isend(np.arange(3), 1, tag) if comm.rank == 0 else None
        comm.barrier()
        received = comm.recv(np.zeros(3, np.int64), 0, tag) if comm.rank == 1 else np.arange(3)
        if sending is not None:
            sending.wait()
        return received.tolist()

    assert run_local(2, work, timeout=5.0, arrival_timeout=5.0) == [[0, 1, 2]] * 2
