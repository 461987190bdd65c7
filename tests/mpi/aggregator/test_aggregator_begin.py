"""Calls in flight: begun in one order, ended in any, and the state after each kind of failure."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread
from typing import Any
from weakref import ref

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from collectives import Communicator, CommunicatorClosed, Handle
from collectives.execution.call import Call
from mpicomp import ALGORITHMS, SSDM, DoubleSqueeze, Marsit, algorithm
from mpicomp.algorithms import Aggregator
from tests.exact import gradient
from tests.mpi.lanes import TIMEOUT_S, every_size, few_ranks, same_everywhere, same_text_on, three_ranks, two_ranks

pytestmark = pytest.mark.communicator(topology="auto")
LENGTHS = (6001, 0, 65, 20_000)
STEPS = 3
FORMS: dict[str, Any] = {name: algorithm(name) for name in ALGORITHMS} | {
    "marsit, rounds": Marsit(2, transactional=True),
    "marsit, one winner": Marsit(2, winners=1),
    "marsit, two winners": Marsit(2, winners=2),
    "ssdm, momentum": SSDM(momentum=0.5),
}

GATHERED = ("dense", "marsit", "marsit, rounds", "marsit, one winner", "relay", "majority-vote", "qsgd", "scalecom")
"""Forms that take other ways where vectors are short and the topology is chosen."""


def states(aggregators: list[Aggregator]) -> list[dict[str, Any]]:
    """Return the states of aggregators in a form that can be compared."""
    return [
        {key: value.tobytes() if isinstance(value, np.ndarray) else value for key, value in one.state_dict().items()}
        for one in aggregators
    ]


# On any number of ranks one form of each kind of traffic: sums, signs, counts and codes along a plan, and gathered
# payloads.
ON_ANY_NUMBER = (
    *(("dense", "ring"), ("marsit", "ring"), ("marsit", "auto")),
    *(("ssdm", "ring"), ("qsgd", "ring"), ("scalecom", "auto")),
)


@every_size
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param(*form, marks=() if form in ON_ANY_NUMBER else three_ranks)
        for form in (*((name, "ring") for name in FORMS), *((name, "auto") for name in GATHERED))
    ],
)
def test_calls_in_flight_give_the_bits_of_calls_one_after_the_other(
    name: str, topology: str, mpi_comm: MPI.Comm
) -> None:
    method, rng = FORMS[name], np.random.default_rng(mpi_comm.rank)
    with Communicator(mpi_comm, topology=topology, timeout=TIMEOUT_S) as comm:
        one_by_one, at_once = ([method.start(comm, n, vector_id=n) for n in LENGTHS] for _ in range(2))
        for step in range(STEPS):
            vectors = [gradient(comm.rank, step, n) for n in LENGTHS]
            expected = [aggregator.aggregate(x) for aggregator, x in zip(one_by_one, vectors, strict=True)]
            handles = [aggregator.begin(x) for aggregator, x in zip(at_once, vectors, strict=True)]
            dense = comm.iallreduce(np.full(3, comm.rank + 1.0))
            assert comm.allreduce(np.ones(2)).sum() == 2 * comm.size  # helps the others along
            for place in rng.permutation(len(handles)):  # each rank in an order of its own
                while place % 2 and not handles[place].poll():
                    pass
                np.testing.assert_array_equal(handles[place].wait(), expected[place])
            assert all(same_everywhere(comm, result) for result in expected)
            np.testing.assert_array_equal(dense.wait(), np.full(3, comm.size * (comm.size + 1) / 2))
        assert states(at_once) == states(one_by_one)
        assert [one.traffic.total.bytes_sent for one in at_once] == [one.traffic.total.bytes_sent for one in one_by_one]


def test_an_aggregator_whose_call_is_in_flight_refuses_others_and_states_on_all_ranks(comm: Communicator) -> None:
    aggregator, x = DoubleSqueeze().start(comm, 100), gradient(comm.rank, 0, 100)
    state, handle = aggregator.state_dict(), aggregator.begin(x)
    for call in (
        lambda: aggregator.aggregate(x),
        lambda: aggregator.begin(x),
        aggregator.state_dict,
        lambda: aggregator.load_state_dict(state),
    ):
        with pytest.raises(RuntimeError, match="the call of step 0 is still in flight: wait"):
            call()
    handle.wait()
    assert aggregator.step == 1
    assert same_everywhere(comm, aggregator.aggregate(x))
    aggregator.load_state_dict(state)
    assert aggregator.step == 0


def test_a_second_call_is_refused_before_a_progress_thread_has_begun_the_first(mpi_comm: MPI.Comm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as comm:
        if not comm.start_progress_thread():
            pytest.skip("MPI lacks MPI_THREAD_MULTIPLE")
        x = np.ones(64, np.float32)
        for _ in range(20):
            aggregator = Marsit(full_precision_every=None).start(comm, 64)
            handle = aggregator.begin(x)
            with pytest.raises(RuntimeError, match="the call of step 0 is still in flight"):
                aggregator.begin(x)
            assert same_everywhere(comm, handle.wait())
            assert aggregator.step == 1


def test_a_dropped_call_is_named_by_the_next_one_and_by_close(mpi_comm: MPI.Comm) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    aggregator, x = DoubleSqueeze().start(comm, 100), gradient(comm.rank, 0, 100)
    for dropped, told in (x, ": keep what begin() returns"), (np.full_like(x, np.nan), "and failed (NonFiniteGradient"):
        aggregator.begin(dropped)
        with pytest.raises(RuntimeError, match=rf"was dropped without wait\(\).*{re.escape(told)}"):
            aggregator.aggregate(x)
        assert same_everywhere(comm, aggregator.aggregate(x))
    assert aggregator.step == 3
    aggregator.begin(x)
    with pytest.raises(RuntimeError, match="was begun and never waited for"):
        comm.close()


@three_ranks
@pytest.mark.parametrize("name", FORMS)
def test_nan_in_one_call_leaves_its_aggregator_and_the_other_calls_as_they_were(name: str, comm: Communicator) -> None:
    harmed, other = (FORMS[name].start(comm, 500, vector_id=k) for k in range(2))
    for one in harmed, other:
        one.aggregate(gradient(comm.rank, 0, 500))
    before, x = states([harmed]), gradient(comm.rank, 1, 500)
    bad = np.where((np.arange(500) == 7) & (comm.rank == comm.size - 1), np.float32(np.nan), x)
    handle, fine = harmed.begin(bad), other.begin(x)
    with pytest.raises(mpicomp.NonFiniteGradient) as raised:
        handle.wait()
    assert f"NaN or infinity in vector 0, step 1, from rank {comm.size - 1};" in str(raised.value)
    assert same_everywhere(comm, fine.wait())
    if name.startswith("marsit") and not getattr(FORMS[name], "transactional", False):
        return  # spoiled: its next call raises an error
    assert states([harmed]) == before
    assert same_everywhere(comm, harmed.aggregate(x))


@two_ranks
@pytest.mark.parametrize("name", FORMS)
def test_a_rank_that_does_not_come_leaves_aggregators_as_they_were(
    name: str, mpi_comm: MPI.Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.consistency.missing_ranks.ANSWER_S", 0.05)  # nobody is there to answer
    method = Marsit(None, transactional=True) if name == "marsit" else FORMS[name]
    # so that steps are cut off half-way
    comm = Communicator(mpi_comm, topology="ring", timeout=30, arrival_timeout=30, verify=False)
    aggregators = [method.start(comm, 20_000, vector_id=k) for k in range(3)]
    for aggregator in aggregators:
        aggregator.aggregate(gradient(comm.rank, 0, 20_000))
    before = states(aggregators)
    if comm.rank == 0:
        comm.timeout = comm.arrival_timeout = 0.1  # nobody else comes
        handles = [aggregator.begin(gradient(0, 1, 20_000)) for aggregator in aggregators]
        for handle in reversed(handles):
            with pytest.raises(mpicomp.CollectiveTimeout):
                handle.wait()
        with pytest.raises(CommunicatorClosed):
            aggregators[0].aggregate(gradient(0, 1, 20_000))
        assert not any(aggregator.traffic.total.calls > 1 for aggregator in aggregators)
        if not name.startswith("marsit") or method.transactional:
            assert states(aggregators) == before
        else:
            with pytest.raises(RuntimeError, match="an earlier step met NaN or infinity, or was cut off"):
                aggregators[0].state_dict()
    mpi_comm.Barrier()


@few_ranks
@pytest.mark.communicator(topology="ring")
@pytest.mark.parametrize("name", ["scalecom", "random-k", "true-top-k"])
@pytest.mark.parametrize("n", [5000, 300_001])  # the residual is made behind the values, and while they travel
def test_a_mean_that_is_not_finite_leaves_the_residual_that_was_made_before_it_unused(
    n: int, name: str, comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregator = FORMS[name].start(comm, n)
    aggregator.aggregate(gradient(comm.rank, 0, n))
    before = states([aggregator])
    with monkeypatch.context() as patch:
        patch.setattr("mpicomp.feedback.nonfinite.all_finite_result", lambda *_: False)
        with pytest.raises(mpicomp.NonFiniteGradient):
            aggregator.aggregate(gradient(comm.rank, 1, n))
    assert states([aggregator]) == before
    assert same_everywhere(comm, aggregator.aggregate(gradient(comm.rank, 1, n)))
    assert states([aggregator]) != before


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_of_a_blocking_call_leaves_the_calls_in_flight_alone(comm: Communicator) -> None:
    fine, other = (Marsit(2).start(comm, 100, vector_id=k) for k in range(2))
    x = gradient(comm.rank, 0, 100)
    pending = fine.begin(x)
    with pytest.raises(mpicomp.CollectiveMismatch) as raised:
        comm.barrier() if comm.rank == 0 else other.aggregate(x)
    assert "rank 0: barrier()" in same_text_on(comm, raised.value, range(comm.size))
    assert same_everywhere(comm, pending.wait())
    assert same_everywhere(comm, other.aggregate(x))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late_s", [0.0, 0.2])
def test_a_mismatch_of_a_call_in_flight_is_told_to_whoever_waits_for_another_call(
    late_s: float, mpi_comm: MPI.Comm
) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    one, other = (Marsit(2, transactional=True).start(comm, 100, vector_id=k) for k in range(2))
    x = gradient(comm.rank, 0, 100)
    time.sleep(0.0 if comm.rank else late_s)  # the others then wait in their second call already
    handle = one.begin(x) if comm.rank else other.begin(x)
    start = time.monotonic()
    for call in comm.barrier, handle.wait:  # the barrier alone would be fine
        with pytest.raises(mpicomp.CollectiveMismatch, match=r"float32\[100\] number [01] by Marsit"):
            call()
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert one.state_dict()["step"] == other.state_dict()["step"] == 0
    mpi_comm.Barrier()


@three_ranks
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_aggregator_residual_and_vector_are_let_go_without_the_garbage_collector(
    name: str, fails: bool, comm: Communicator
) -> None:
    gc.disable()
    try:
        aggregator = FORMS[name].start(comm, 1000)
        x = np.full(1000, np.nan, np.float32) if fails else gradient(comm.rank, 0, 1000).copy()
        with suppress(mpicomp.NonFiniteGradient):  # pytest.raises would keep the error
            aggregator.aggregate(x)
            aggregator.begin(x).wait()
        kept = [ref(one) for one in (aggregator, aggregator.feedback, x) if one is not None]
        del aggregator, x
        comm.barrier()  # persistent requests are freed at the next call
        assert [one() for one in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_two_communicators_polled_crosswise_help_each_other(mpi_comm: MPI.Comm) -> None:
    with Communicator(mpi_comm, timeout=TIMEOUT_S) as one, Communicator(mpi_comm, timeout=TIMEOUT_S) as other:
        x = gradient(one.rank, 0, 100)
        handles = [Marsit(None).start(comm, 100).begin(x) for comm in (one, other)]
        for handle in handles if one.rank % 2 else reversed(handles):
            while not handle.poll():
                pass
        assert all(same_everywhere(one, handle.wait()) for handle in handles)


def moving(comm: Communicator, seconds: float) -> Handle:
    """Begin a call that moves all the time, and takes so long."""

    def steps() -> Iterator[bool]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
            yield True
            yield False  # those who wait for it look after the others

    return comm.begin(Call(comm, lambda: "a long call"), steps())


@few_ranks
@pytest.mark.mpi(min_size=2)
@pytest.mark.communicator(timeout=2.0)
@pytest.mark.parametrize("waits_for", ["long", "short", "either"])
def test_a_call_behind_one_that_takes_longer_than_the_timeout_but_moves_does_not_time_out(
    waits_for: str, comm: Communicator
) -> None:
    aggregator = mpicomp.algorithm("dense").start(comm, 10)  # such a small sum waits for its turn
    long = moving(comm, 2.6)
    if waits_for == "either" and comm.rank:  # begins the next one when the long one has ended
        long.wait()
    short = aggregator.begin(np.ones(10, np.float32))
    for handle in (long, short) if waits_for == "long" else (short, long):
        handle.wait()


def test_a_call_that_another_thread_has_waited_for_is_forgotten_by_the_one_that_began_it(comm: Communicator) -> None:
    handle = comm.iallreduce(np.ones(3))
    thread = Thread(target=handle.wait)
    thread.start()
    thread.join()
    assert handle.poll()
    assert Call(comm, lambda: "a call").thread.in_flight == []


@pytest.mark.mpi(min_size=2)
def test_a_vector_that_one_rank_rejects_among_calls_in_flight_ends_these_by_the_same_error_on_all_ranks(
    mpi_comm: MPI.Comm,
) -> None:
    comm = Communicator(mpi_comm, timeout=TIMEOUT_S)
    aggregator, x, start = DoubleSqueeze().start(comm, 100), gradient(comm.rank, 0, 100), time.monotonic()
    pending = moving(comm, TIMEOUT_S)
    if comm.rank == 0:
        with pytest.raises(ValueError, match="the vector has 99 elements"):
            aggregator.begin(x[1:])
    else:
        aggregator.begin(x)
    with pytest.raises(mpicomp.CollectiveMismatch, match=r"rank 0 rejects aggregate: .*has 99 elements"):
        pending.wait()
    assert time.monotonic() - start < TIMEOUT_S / 2
    with pytest.raises(CommunicatorClosed):
        comm.barrier()
    mpi_comm.Barrier()
