"""Calls that the progress thread drives: the same results and errors, without the caller's help."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from collectives import Communicator, CommunicatorClosed, Handle
from collectives.execution.call import Call
from mpicomp import SSDM, DoubleSqueeze, Marsit, ScaleCom
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S, few_ranks, impatient, same_everywhere

pytestmark = pytest.mark.communicator(topology="ring")
METHODS = (Marsit(2), DoubleSqueeze(), ScaleCom(), SSDM())


@pytest.fixture
def driven(comm: Communicator) -> Communicator:
    """Its calls are driven by the progress thread."""
    assert comm.start_progress_thread()
    return comm


def test_driven_calls_give_the_bits_of_calls_that_the_caller_drives(mpi_comm: MPI.Comm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as plain, Communicator(mpi_comm, timeout=TIMEOUT_S) as driven:
        assert driven.start_progress_thread()
        sides = [
            [method.start(comm, 6001, vector_id=k) for k, method in enumerate(METHODS)] for comm in (plain, driven)
        ]
        for step in range(3):
            x = gradient(plain.rank, step, 6001)
            expected = [aggregator.aggregate(x) for aggregator in sides[0]]
            handles = [aggregator.begin(x) for aggregator in sides[1]]
            assert driven.allreduce(np.ones(2)).sum() == 2 * driven.size  # a blocking call among them
            order = np.random.default_rng(plain.rank).permutation(len(handles))
            for place in order:
                np.testing.assert_array_equal(handles[place].wait(), expected[place])


def test_a_driven_call_goes_on_while_its_caller_does_something_else(driven: Communicator) -> None:
    handle = Marsit(None).start(driven, 100_000).begin(gradient(driven.rank, 0, 100_000))
    ended = threading.Event()
    handle.then(lambda _: ended.set())
    assert ended.wait(TIMEOUT_S)
    assert handle.poll()
    assert same_everywhere(driven, handle.wait())


def test_a_callback_runs_once_with_the_handle_and_may_begin_a_call(driven: Communicator) -> None:
    told: list[Handle] = []
    second: list[Handle] = []
    ended = threading.Event()

    def go_on(handle: Handle) -> None:
        told.append(handle)
        second.append(driven.iallreduce(np.full(3, 2.0)))
        second[0].then(lambda _: ended.set())

    first = driven.iallreduce(np.ones(3))
    first.then(go_on)
    assert ended.wait(TIMEOUT_S)
    assert told == [first]
    np.testing.assert_array_equal(second[0].wait(), np.full(3, 2.0 * driven.size))
    late: list[Handle] = []
    first.then(late.append)  # of a call that has ended
    driven.barrier()
    driven.barrier()
    first.wait()
    assert late == [first]


def test_an_error_of_a_callback_is_reported_and_the_others_are_called(
    driven: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(repr(args.exc_value)))
    handle = Marsit(None).start(driven, 100_000).begin(gradient(driven.rank, 0, 100_000))
    handle.then(lambda _: {}["no such key"])
    handle.then(lambda _: ended.set())
    assert ended.wait(TIMEOUT_S / 4)
    assert reported == ["KeyError('no such key')"]
    assert same_everywhere(driven, handle.wait())


def test_waiting_in_a_callback_is_refused(driven: Communicator) -> None:
    problems: list[str] = []
    ended = threading.Event()

    def wait_there(_: Handle) -> None:
        try:
            driven.allreduce(np.ones(3))
        except RuntimeError as error:
            problems.append(str(error))
        ended.set()

    handle = driven.iallreduce(np.ones(3))
    handle.then(wait_there)
    assert ended.wait(TIMEOUT_S)
    handle.wait()
    assert "a callback cannot wait" in problems[0]


def test_threads_may_take_turns_with_one_communicator(driven: Communicator) -> None:
    """Unlike with a communicator that its caller drives, where a second thread is refused."""
    first = driven.iallreduce(np.ones(3))
    sums: list[Any] = []
    other = threading.Thread(target=lambda: sums.append(driven.allreduce(np.full(3, 2.0))))
    other.start()
    other.join(TIMEOUT_S)
    np.testing.assert_array_equal(sums[0], np.full(3, 2.0 * driven.size))
    np.testing.assert_array_equal(first.wait(), np.full(3, 1.0 * driven.size))


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_a_mismatch_is_raised_by_who_waits_on_every_rank(driven: Communicator) -> None:
    with pytest.raises(mpicomp.CollectiveMismatch, match=r"rank 0: barrier\(\)"):
        driven.barrier() if driven.rank == 0 else driven.allreduce(np.ones(3))
    assert driven.allreduce(np.ones(1))[0] == driven.size  # the calls that follow are fine


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_all_calls_that_were_begun_before_a_mismatch_was_seen_raise_it(driven: Communicator) -> None:
    handles = [driven.iallreduce(np.ones(3 + (driven.rank == 1)))]
    start = time.perf_counter()
    if driven.rank == 0:
        while not handles[0]._call.done:
            time.sleep(0.001)
        handles += [driven.iallreduce(np.ones(2)) for _ in range(3)]
    for handle in handles:
        with pytest.raises(mpicomp.CollectiveMismatch, match=r"rank 1: iallreduce\(sum\) of float64\[4\]"):
            handle.wait()
    assert time.perf_counter() - start < TIMEOUT_S / 2
    assert driven.allreduce(np.ones(1))[0] == driven.size


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_ends_the_calls_of_the_others(mpi_comm: MPI.Comm) -> None:
    comm = impatient(mpi_comm, 0.5)
    assert comm.start_progress_thread()
    if comm.rank == 0:
        handles = [comm.iallreduce(np.ones(3)) for _ in range(2)]
        for handle in reversed(handles):
            with pytest.raises(mpicomp.CollectiveTimeout):
                handle.wait()
        with pytest.raises(CommunicatorClosed):
            comm.barrier()
    mpi_comm.Barrier()


@few_ranks
@pytest.mark.mpi(min_size=2)
def test_an_interrupt_of_who_waits_gives_up_the_call_and_tells_the_other_ranks(
    mpi_comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    assert comm.start_progress_thread()
    start = time.monotonic()
    # a sum that does not travel with the check of the call, or it would be there before the interrupt
    if comm.rank == 0:
        handle = comm.iallreduce(np.ones(300_000))
        call: Call = handle._call
        assert call.completion is not None

        def interrupted(_: float) -> bool:
            monkeypatch.undo()
            raise KeyboardInterrupt

        class Event:  # a signal arrives in the wait
            wait, is_set, set = staticmethod(interrupted), staticmethod(lambda: False), staticmethod(lambda: None)

        mpi_comm.Barrier()  # the others do not come before
        monkeypatch.setattr(call.completion, "_ended", Event)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        with pytest.raises(CommunicatorClosed):
            comm.barrier()
    else:
        mpi_comm.Barrier()
        time.sleep(0.5)
        with pytest.raises((mpicomp.CollectiveTimeout, CommunicatorClosed)):
            comm.iallreduce(np.ones(300_000)).wait()
    assert time.monotonic() - start < TIMEOUT_S / 2
    mpi_comm.Barrier()


@few_ranks
def test_closing_waits_for_what_was_handed_over(mpi_comm: MPI.Comm) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    comm.start_progress_thread()
    handle = comm.iallreduce(np.ones(3))
    comm.close()
    np.testing.assert_array_equal(handle.wait(), np.full(3, 1.0 * comm.size))


@few_ranks
def test_a_call_in_flight_hinders_the_thread_from_taking_over(comm: Communicator) -> None:
    handle = comm.iallreduce(np.ones(3))
    if not handle.poll():
        with pytest.raises(RuntimeError, match=r"iallreduce.*in flight"):
            comm.start_progress_thread()
    handle.wait()
    assert comm.start_progress_thread()


def test_a_thread_is_not_started_for_ranks_that_are_threads() -> None:
    assert mpicomp.run_local(2, lambda comm: comm.start_progress_thread()) == [False, False]


@few_ranks
def test_a_trace_tells_the_callers_waits_from_the_threads_work(mpi_comm: MPI.Comm, tmp_path: Path) -> None:
    folder = mpi_comm.bcast(str(tmp_path))
    with Communicator(mpi_comm, timeout=TIMEOUT_S, trace=folder) as comm:
        comm.start_progress_thread()
        aggregator = Marsit(None).start(comm, 300_000)
        aggregator.begin(gradient(comm.rank, 0, 300_000)).wait()
    events = json.loads((Path(folder) / f"rank-{mpi_comm.rank}.json").read_text())["traceEvents"]
    threads = {event["cat"]: event["tid"] for event in events if event["ph"] == "X"}
    assert threads["exposed"] == 0
    assert threads["encode"] == 1
    assert sum(event.get("cat") == "flight" and event["ph"] == "b" for event in events) == 1


@pytest.mark.mpi(min_size=2)
def test_more_calls_than_are_driven_at_once_do_not_hold_up_those_of_another_communicator(mpi_comm: MPI.Comm) -> None:
    many = 200
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as first, Communicator(mpi_comm, timeout=TIMEOUT_S) as second:
        assert first.start_progress_thread()
        assert second.start_progress_thread()
        x = np.ones(3)
        early = [first.iallreduce(x) for _ in range(many)] if mpi_comm.rank == 0 else []
        sums = [handle.wait() for handle in [second.iallreduce(k * x) for k in range(many)]]
        early = early or [first.iallreduce(x) for _ in range(many)]
        assert [total[0] for total in sums] == [k * mpi_comm.size for k in range(many)]
        assert all((handle.wait() == mpi_comm.size).all() for handle in early)
