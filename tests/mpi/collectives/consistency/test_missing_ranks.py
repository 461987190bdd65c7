"""Ranks that come late or never: the other ranks' limits, warnings and errors."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from collectives import CollectiveMismatch, CollectiveTimeout, Communicator
from collectives.consistency.call_check import RECEIVE_EACH
from collectives.consistency.descriptions import fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.execution.call import Call
from tests.mpi.lanes import TIMEOUT_S, few_ranks

pytestmark = pytest.mark.mpi(min_size=2)
SHORT_S = 0.5
# A rank may be late by more than the timeout within a call, for which eight ranks on two cores need some time as well.
WITHIN_S, LATE_S = 1.5, 2.0
patient = pytest.mark.communicator(timeout=WITHIN_S, arrival_timeout=TIMEOUT_S)


@patient
@pytest.mark.parametrize("late", [0, -1])
def test_a_late_rank_is_waited_for_and_named(
    late: int, comm: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("collectives.progress.polling.WARN_S", 0.2)
    late %= comm.size
    comm.barrier()
    if comm.rank == late:
        time.sleep(LATE_S)
    assert comm.allreduce(np.ones(3))[0] == comm.size
    told = "\n".join(caplog.messages)
    everyones = comm.mpi_comm.allgather(told)
    assert told == "" or comm.rank != late
    first = everyones[1 if late == 0 else 0]  # the lowest of those that wait
    assert re.search(rf"come to call 2, allreduce.* s, nothing from rank {late}; giving up after 20 s", first), first


@patient
def test_the_lowest_rank_asks_for_all_and_the_others_answer(comm: Communicator) -> None:
    missing = MissingRanks(comm.mpi_comm.Dup(), 2.0)
    missing.calls = 5 if comm.rank else 6
    if comm.rank == 0:
        missing.send_question(6)
    comm.mpi_comm.Barrier()
    deadline = time.monotonic() + TIMEOUT_S
    while (comm.rank or len(missing._calls_of) < comm.size - 1) and time.monotonic() < deadline:
        missing.receive_messages()
        if comm.rank and missing._question_of_lower:
            break
    others = "ranks 1" if comm.size > 2 else "rank 1"
    if comm.rank:
        missing.send_question(6)
    comm.mpi_comm.Barrier()
    if comm.rank == 0:
        assert missing.describe_late(6).startswith(f", nothing from {others}")
        assert missing.describe_late(5) == ""
    else:
        assert missing.describe_late(6) is None
        missing.send_question(6)  # no lower rank has sent one since
        assert missing.describe_late(6) is not None


@few_ranks
@patient
def test_what_was_asked_is_taken_at_the_end_by_a_rank_that_never_waited(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, timeout=WITHIN_S, arrival_timeout=TIMEOUT_S)
    for one in range(2):
        comm.missing.calls = max(comm.missing.calls, one)
        comm.missing.send_question(RECEIVE_EACH)
    comm.close()
    sent = mpi_comm.allgather(comm.missing._sent)
    assert sum(map(sum, sent)) > 0
    assert [each[comm.rank] for each in sent] == list(comm.missing._received)


def test_silence_within_a_call_ends_it_after_the_short_timeout(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm, timeout=SHORT_S, arrival_timeout=TIMEOUT_S)
    start, last = time.monotonic(), comm.size - 1
    if comm.rank == last:  # comes to the barrier, and does not go through it
        call = Call(comm, lambda: "barrier()")
        comm.run(call, comm.check(call, fingerprint("barrier")))
    else:
        with pytest.raises(CollectiveTimeout, match=f"not all ranks reach the barrier.*no answer from.*{last}"):
            comm.barrier()
        assert time.monotonic() - start < TIMEOUT_S / 2
    mpi_comm.Barrier()


@pytest.mark.communicator(timeout=WITHIN_S, arrival_timeout=TIMEOUT_S, verify=False)
@pytest.mark.parametrize("topology", ["ring", "star"])
def test_without_a_check_a_late_rank_is_waited_for_too(topology: str, comm: Communicator) -> None:
    aggregator = mpicomp.Marsit().start(comm, 100)
    for _ in range(2):
        if comm.rank == 0:
            time.sleep(LATE_S)
        aggregator.aggregate(np.ones(100, np.float32))


@few_ranks
@patient
def test_a_call_waits_for_its_turn_behind_one_to_which_a_rank_comes_late(comm: Communicator) -> None:
    if comm.rank == 0:
        time.sleep(LATE_S)
    handles = [comm.iallreduce(np.ones(3)) for _ in range(10)]  # more than are compared at once
    assert all(handle.wait()[0] == comm.size for handle in reversed(handles))


@few_ranks
@pytest.mark.parametrize("verify", [True, False])
def test_a_rank_that_leaves_by_an_exception_is_not_waited_for(mpi_comm: MPI.Intracomm, verify: bool) -> None:
    start, last = time.monotonic(), mpi_comm.size - 1

    def work() -> None:
        with Communicator(mpi_comm, arrival_timeout=TIMEOUT_S if verify else 1.0, verify=verify) as comm:
            comm.barrier()
            if comm.rank == last:
                raise KeyError("a file is missing")
            comm.barrier()

    if mpi_comm.rank == last:
        with pytest.raises(KeyError):
            work()
    else:
        told = (
            f"have come to call 2, .*: rank {last} left by an exception|another rank has given up"
            if verify
            else "barrier"
        )
        with pytest.raises(CollectiveTimeout, match=told):
            work()
        assert time.monotonic() - start < TIMEOUT_S / 2
    mpi_comm.Barrier()


def test_a_rank_that_closes_the_communicator_while_others_make_a_call_is_named_at_once(mpi_comm: MPI.Intracomm) -> None:
    comm = Communicator(mpi_comm)
    with pytest.raises(CollectiveMismatch, match=r"rank 0: close\(\); rank.*: barrier\(\)"):
        comm.close() if comm.rank == 0 else comm.barrier()
    comm.barrier()
    comm.close()
