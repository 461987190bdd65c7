"""A trace is complete, true and aligned, and recording it changes no result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator
from collectives.trace import Trace
from collectives.trace.clocks import compare_clocks, offset_at
from collectives.trace.recorder import PROGRAMS_OF_PARTS
from mpicomp import QSGD, CascadingSSDM, Marsit, PerNode, ScaleCom
from mpicomp.cli.trace import RankTrace, table
from tests.mpi.collectives.trace.traces import everyones, require_aligned, spans, vector
from tests.mpi.lanes import TIMEOUT_S

N = 40_000
MESSAGE = "call", "peer", "message", "piece", "chunk"
COMPUTING = {"encode": "seconds_encoding", "decode": "seconds_decoding", "merge": "seconds_merging"}


@pytest.mark.parametrize("topology", ["ring", "tree", "halving-doubling", "torus"])
@pytest.mark.parametrize("piece_bytes", [None, 512], ids=["walked", "executed"])
def test_every_piece_and_every_message_is_there(
    mpi_comm: MPI.Intracomm, folder: Path, topology: str, piece_bytes: int | None
) -> None:
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes, trace=folder) as comm:
        method = Marsit(full_precision_every=None) if comm.size > 1 else CascadingSSDM()  # along a plan in any case
        aggregator: Any = method.start(comm, N)
        for _ in range(3):
            aggregator.aggregate(vector(comm.rank))
        programs = [aggregator.reducer.program] * 3
    traces = everyones(mpi_comm, folder)
    assert not [event for trace in traces for event in trace["traceEvents"] if "finished" in event.get("args", {})]
    for call, program in enumerate(programs, 1):
        for kind in ("encode", "decode"):
            found = [s["args"]["piece"] for s in spans(traces[mpi_comm.rank], kind) if s["args"]["call"] == call]
            assert sorted(found) == list(range(len(program.pieces)))
        merged = [s["args"] for s in spans(traces[mpi_comm.rank], "merge") if s["args"]["call"] == call]
        of_plan = [(m.piece, m.chunk, m.step, m.peer) for m in program.recvs if m.held_weight]
        assert sorted((m["piece"], m["chunk"], m["step"], m["peer"]) for m in merged) == sorted(of_plan)
    messages = require_aligned(traces)
    assert len([m for m in messages if m[1] == mpi_comm.rank]) == sum(len(program.sends) for program in programs)
    begun = [event for event in traces[mpi_comm.rank]["traceEvents"] if event["ph"] == "b" and event["cat"] == "send"]
    assert (sum(event["args"]["bytes"] for event in begun) > 0) == (mpi_comm.size > 1)
    for trace in traces:
        assert len([s for s in spans(trace, "call") if s["name"] == "aggregate"]) == 3
        assert [s["args"]["step"] for s in spans(trace, "call")] == [0, 1, 2]
        if mpi_comm.size > 1:
            assert len(spans(trace, "check")) == 3
    assert len(table([RankTrace.of(trace) for trace in traces]).splitlines()) == 1 + mpi_comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("piece_bytes", [None, 512], ids=["walked", "executed"])
def test_a_wait_names_the_message_that_ends_it(mpi_comm: MPI.Intracomm, folder: Path, piece_bytes: int | None) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, verify=False, piece_bytes=piece_bytes, trace=folder) as comm:
        aggregator = Marsit(full_precision_every=None).start(comm, N)
        for _ in range(3):
            if comm.rank == 0:
                time.sleep(0.05)  # the others wait for it
            aggregator.aggregate(vector(comm.rank))
    ended = 0
    for trace in everyones(mpi_comm, folder):
        over = {event["id"]: event["ts"] for event in trace["traceEvents"] if event["ph"] == "e"}
        messages = {
            (event["cat"], *(event["args"][key] for key in MESSAGE)): event["id"]
            for event in trace["traceEvents"]
            if event["ph"] == "b"
        }
        for wait in spans(trace, "wait"):
            if "until" in wait["args"]:
                named = wait["args"]["until"], *(wait["args"][key] for key in MESSAGE)
                assert -1e-3 <= over[messages[named]] - wait["ts"] <= wait["dur"] + 1e-3
                ended += 1
    assert ended


@pytest.mark.parametrize("piece_bytes", [None, 512], ids=["walked", "executed"])
def test_what_is_not_merged_is_there_too(mpi_comm: MPI.Intracomm, folder: Path, piece_bytes: int | None) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=piece_bytes, trace=folder) as comm:
        aggregator: Any = QSGD().start(comm, N)
        aggregator.aggregate(vector(comm.rank))
        program = aggregator.reducer.program
        ScaleCom().start(comm, N).aggregate(vector(comm.rank))
    traces = everyones(mpi_comm, folder)
    require_aligned(traces)
    mine = [s["cat"] for s in spans(traces[mpi_comm.rank]) if s["args"].get("call") == 1]
    pieces = len(program.pieces)
    assert (mine.count("encode"), mine.count("decode"), mine.count("merge")) == (pieces // mpi_comm.size, pieces, 0)
    for trace in traces:
        assert len(spans(trace, "call")) == 2


@pytest.mark.mpi(min_size=4, max_size=4)
def test_messages_between_nodes_name_the_ranks_of_the_job(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=512, trace=folder, ranks_per_node=2) as comm:
        aggregator = PerNode(Marsit(full_precision_every=None)).start(comm, N)
        for _ in range(3):
            aggregator.aggregate(vector(comm.rank))
        comm.allreduce(np.ones(N, np.float32))  # whose messages have numbers of programs too
    traces = everyones(mpi_comm, folder)
    require_aligned(traces)
    for rank, trace in enumerate(traces):
        phases = [s["name"] for s in spans(trace) if s["cat"] in ("local", "node")]
        assert phases == ["local sum", "between nodes", "local gather"] * 3
        (call,) = {s["args"]["call"] for s in spans(trace, "encode") if s["args"]["call"] == PROGRAMS_OF_PARTS + 1}
        peers = {e["args"]["peer"] for e in trace["traceEvents"] if e["ph"] == "b" and e["args"]["call"] == call}
        assert peers == {(rank + 2) % 4}
        assert len([s for s in spans(trace, "call") if s["name"] == "aggregate"]) == 3


def test_checks_of_calls_in_the_background_are_not_recorded(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder) as comm:
        aggregator = QSGD().start(comm, N)
        aggregator.begin(vector(comm.rank)).wait()
        comm.iallreduce(np.ones(N)).wait()
        comm.barrier()
    for trace in everyones(mpi_comm, folder):  # they would overlap those of other calls
        assert [s["name"] for s in spans(trace, "check")] == ["agreement"]


def test_calls_of_every_kind_nest(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with Communicator(mpi_comm, "auto", TIMEOUT_S, trace=str(folder)) as comm:
        gathered = Marsit(full_precision_every=3).start(comm, 1000)
        cascading = CascadingSSDM().start(comm, N)
        for _ in range(4):
            gathered.aggregate(vector(comm.rank, 1000))
        cascading.aggregate(vector(comm.rank))
        handles = [comm.iallreduce(np.ones(3000)), comm.iallreduce(np.ones(500_000))]
        comm.allreduce(np.ones(10))
        handles += [comm.iallreduce(np.ones(3000)), comm.iallreduce(np.ones(500_000))]
        for handle in handles[:: 1 if comm.rank % 2 else -1]:
            assert (handle.wait() == comm.size).all()
        comm.allreduce(np.ones(200_000))
        comm.broadcast(np.ones(10), comm.size - 1)
        comm.barrier()
    traces = everyones(mpi_comm, folder)
    require_aligned(traces)
    for trace in traces:
        names = [s["name"] for s in spans(trace, "call")]
        calls = {"aggregate": 5, "iallreduce": 4, "allreduce": 2, "broadcast": 1, "barrier": 1}
        assert {name: names.count(name) for name in names} == calls
        told = [s["args"] for s in spans(trace, "call") if s["name"] in ("allreduce", "broadcast", "barrier")]
        sums = [{"op": "sum", "bytes": nbytes} for nbytes in (80, 1_600_000)]
        assert told == [*sums, {"root": trace["otherData"]["ranks"] - 1, "bytes": 80}, {}]
        inner = {s["name"] for s in spans(trace)} - set(names)
        assert {"encode", "prepare", "decode", "agreement"} <= inner
        for kind in ("encode", "decode"):  # of the two calls that one all-gather serves
            assert [s["args"] for s in spans(trace, kind) if "call" not in s["args"]] == [{"piece": 0}] * 2
        if mpi_comm.size > 1:
            assert {"merge", "agreement and sum"} <= inner
            assert any(name.startswith("wait for iallreduce") for name in inner)


@pytest.mark.parametrize("topology", ["auto", "ring", "double-tree"])
def test_results_are_the_same_with_a_trace_and_without(mpi_comm: MPI.Intracomm, folder: Path, topology: str) -> None:
    def results(trace: Path | None) -> list[np.ndarray]:
        found = []
        with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=1024, trace=trace) as comm:
            for n in (1000, 10_000):
                marsit, ssdm = Marsit(full_precision_every=2).start(comm, n), CascadingSSDM().start(comm, n)
                x = vector(comm.rank, n)
                found += [method.aggregate(x * (1 + step)) for method in (marsit, ssdm) for step in range(3)]
                found += [comm.allreduce(x), comm.iallreduce(x, "mean").wait()]
        return found

    for plain, traced in zip(results(None), results(folder), strict=True):
        np.testing.assert_array_equal(plain, traced)


@pytest.mark.parametrize(
    ("topology", "n", "piece_bytes"),
    [("ring", N, None), ("ring", N, 512), ("auto", 1000, None)],
    ids=["walked", "executed", "gathered"],
)
def test_sums_are_those_of_traffic(
    mpi_comm: MPI.Intracomm, folder: Path, topology: str, n: int, piece_bytes: int | None
) -> None:
    calls = 5
    with Communicator(mpi_comm, topology, TIMEOUT_S, piece_bytes=piece_bytes, trace=folder) as comm:
        aggregator: Any = Marsit(full_precision_every=None).start(comm, n)
        aggregator.aggregate(vector(comm.rank, n))  # compiles
        slow_down(aggregator.driver, is_last=mpi_comm.rank == 0)
        names = (*COMPUTING.values(), "seconds_waiting")
        before = [getattr(aggregator.traffic.total, name) for name in names]
        for _ in range(calls):
            aggregator.aggregate(vector(comm.rank, n))
        after = [getattr(aggregator.traffic.total, name) for name in names]
        exchange = aggregator.reducer
        travelled = hasattr(exchange, "payload")
    trace = json.loads((folder / f"rank-{mpi_comm.rank}.json").read_text())
    mine = RankTrace.of(trace, calls)
    told = dict(zip((*COMPUTING, "wait"), np.subtract(after, before).tolist(), strict=True))
    found = {kind: mine.seconds[kind] for kind in told}
    since = sorted(s["ts"] for s in spans(trace, "call"))[-calls]
    checks, waits, prepared = (
        [s for s in spans(trace, kind) if s["ts"] >= since] for kind in ("check", "wait", "prepare")
    )
    # words drawn while the ranks agree are no part of a run; nor is waiting for reports that travel beside a plan
    found["merge"] += sum(s["dur"] for s in prepared if not lies_in(s, checks)) * 1e-6
    if travelled:
        found["wait"] -= sum(s["dur"] for s in waits if s["name"].startswith("side")) * 1e-6
    assert not [s for s in spans(trace, "merge") if lies_in(s, waits)]
    n_merges = len([m for m in exchange.program.recvs if m.held_weight]) if travelled else 0
    slowed = {"encode": len(exchange.pieces), "decode": len(exchange.pieces), "merge": n_merges}
    # what the trace measures lies within what `Traffic` does, but by rank 0's clock, and in whole nanoseconds
    off = sum(reading["round_trip"] for reading in trace["otherData"]["clock"]) / 2 + 1e-6
    for kind, count in slowed.items():
        assert calls * count * SLOW_S - off <= found[kind] <= told[kind] + off, kind
    # a rank may lose its core between the two readings of a time: the trace counts that for the spans around
    around = mine.seconds["call"] + mine.seconds["check"] + sum(s["dur"] for s in prepared if lies_in(s, checks)) * 1e-6
    for kind, seconds in told.items():
        assert 0.95 * found[kind] - off <= seconds <= found[kind] + around + off, kind
    assert sum(told.values()) <= sum(found.values()) + around + off
    assert waits or mpi_comm.rank == 0 or not travelled  # rank 0 encodes last; codes of all-gathers travel in checks


SLOW_S = 0.003


def lies_in(span: dict[str, Any], outer: list[dict[str, Any]]) -> bool:
    return any(s["ts"] <= span["ts"] < s["ts"] + s["dur"] for s in outer)


def slow_down(driver: Any, *, is_last: bool) -> None:
    """Lengthen all computing of a method, so that it stands out from the work around it.

    The encoding of the rank that is last takes longest.
    """

    def slow(method: Callable[..., None], seconds: float = SLOW_S) -> Callable[..., None]:
        def slower(*args: Any) -> None:
            time.sleep(seconds)
            method(*args)

        return slower

    feedback, reducer, (one,) = driver.feedback, driver.reducer, driver._rounds
    feedback.decode = slow(feedback.decode)  # of pieces that are decoded with the reports, in place of the round's
    encode = slow(one.encode, 5 * SLOW_S if is_last else SLOW_S)
    driver._rounds = (one._replace(encode=encode, decode=slow(one.decode)),)
    if hasattr(reducer, "payload"):
        reducer.payload.merge = slow(reducer.payload.merge)


class Clock:
    """A clock that is ahead of the machine's, and runs faster or slower."""

    def __init__(self, offset: float, drift: float) -> None:
        self._offset, self._drift, self._start = offset, drift, time.perf_counter()

    def __call__(self) -> float:
        return self.shown_at(time.perf_counter())

    def shown_at(self, true: float) -> float:
        return true + self._offset + self._drift * (true - self._start)


@pytest.fixture
def clock(mpi_comm: MPI.Intracomm) -> Clock:
    return Clock(100.0 * mpi_comm.rank, 1e-3 * (mpi_comm.rank - 1))


def test_the_handshake_finds_offset_and_drift(mpi_comm: MPI.Intracomm, clock: Clock) -> None:
    readings = [compare_clocks(mpi_comm, clock, TIMEOUT_S)]
    middle = time.perf_counter()
    time.sleep(0.5)
    readings.append(compare_clocks(mpi_comm, clock, TIMEOUT_S))
    everyones_start = mpi_comm.allgather(clock._start)
    of_rank_0 = Clock(0.0, -1e-3)
    of_rank_0._start = everyones_start[0]
    error = max(reading.round_trip for reading in readings) / 2
    assert mpi_comm.rank == 0 or 0 < error < 0.1
    for true in (middle, middle + 0.25, middle + 0.5):
        shown = clock.shown_at(true)
        assert shown + offset_at(readings, shown) == pytest.approx(of_rank_0.shown_at(true), abs=error + 2e-6)
    # the drift is seen: the first reading alone is off by more
    if mpi_comm.rank > 0:
        change = readings[1].offset - readings[0].offset
        slope = -1e-3 * mpi_comm.rank / (1 + 1e-3 * (mpi_comm.rank - 1))  # by this rank's clock
        assert change == pytest.approx(slope * (readings[1].at - readings[0].at), abs=2 * error)


def test_messages_are_aligned_whatever_the_clocks_show(
    mpi_comm: MPI.Intracomm, folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Callable[..., None] = Trace.__init__
    monkeypatch.setattr(Trace, "__init__", lambda self, folder, rank, size: made(self, folder, rank, size, clock))
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=512, trace=folder) as comm:
        for _ in range(10):
            comm.allreduce(np.ones(2000))
            time.sleep(0.02)
    traces = everyones(mpi_comm, folder)
    messages = require_aligned(traces)
    assert bool(messages) == (mpi_comm.size > 1)
    for trace in traces:
        assert 0 < max(s["ts"] for s in spans(trace)) < 30e6
