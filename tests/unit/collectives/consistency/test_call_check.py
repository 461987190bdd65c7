"""Checks of more calls than may be compared at once."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain
from threading import Barrier

import pytest

import mpicomp
from collectives import CollectiveMismatch, Communicator
from collectives.consistency.call_check import AT_ONCE, CallCheck
from collectives.consistency.missing_ranks import MissingRanks
from collectives.execution.call import Call


def test_a_call_whose_check_is_over_at_once_has_not_stalled_since_it_waited_for_its_turn() -> None:
    together = Barrier(2, timeout=20)

    def turns_idle(comm: Communicator) -> int:
        check = CallCheck(comm.mpi_comm, MissingRanks(comm.mpi_comm, 1.0), 64)
        late = Call(comm, lambda: "one more than may be compared at once")
        steps = [check.steps(Call(comm, lambda: "one of many"), 5) for _ in range(AT_ONCE)]
        last = check.steps(late, 5)
        if comm.rank:
            together.wait()  # rank 0 has begun all, and none of its checks can be over
        for one in (*steps, last):
            next(one, None)
        if not comm.rank:
            late.idle(rest=False)
            together.wait()
        for one in steps:
            while next(one, None) is not None:
                pass
        if comm.rank:
            next(last, None)
        together.wait()  # rank 1's entry in the last check is there before rank 0 begins it
        while next(last, None) is not None:
            pass
        return late.idle_turns

    assert mpicomp.run_local(2, turns_idle) == [0, 0]


def test_of_several_mismatches_the_first_is_raised_whichever_check_ends_first() -> None:
    def error(comm: Communicator) -> str:
        check = CallCheck(comm.mpi_comm, MissingRanks(comm.mpi_comm, 1.0))
        calls = [Call(comm, partial("{} of rank {}".format, n, comm.rank)) for n in (1, 2)]
        for call in calls:
            check.enter(call)
        steps = [check.steps(call, comm.rank) for call in reversed(calls)]
        with pytest.raises(CollectiveMismatch) as caught:
            deque(chain.from_iterable(zip(*steps, strict=False)), maxlen=0)  # until one raises
        return str(caught.value)

    first, second = mpicomp.run_local(2, error)
    assert first == second
    assert first.startswith("the ranks differ in collective call 1: rank 0: 1 of rank 0; rank 1: 1 of rank 1")
