"""A trace is there after any end of a run, takes bounded memory, and is written only on request."""

from __future__ import annotations

import errno
import gc
import json
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import CollectiveTimeout, Communicator, CommunicatorClosed
from collectives.trace import Trace
from collectives.trace.recorder import flush
from mpicomp import CascadingSSDM, Marsit
from mpicomp.cli.trace import RankTrace
from tests.mpi.collectives.trace.traces import everyones, spans, vector
from tests.mpi.lanes import TIMEOUT_S, few_ranks

pytestmark = few_ranks

N = 40_000


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    last = mpi_comm.size - 1
    if mpi_comm.rank == last:
        (folder / f"rank-{last}.json").mkdir()
    mpi_comm.Barrier()
    with pytest.raises(OSError, match=rf"^rank {last} of {last + 1}, trace='.*': Is a directory; name a folder"):
        Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder)
    mpi_comm.Barrier()
    assert [path.name for path in folder.iterdir()] == [f"rank-{last}.json"]


def test_a_folder_is_for_one_communicator(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    first = Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder)
    about = json.loads((folder / f"rank-{mpi_comm.rank}.json").read_text())["otherData"]
    assert (about["rank"], about["ranks"]) == (mpi_comm.rank, mpi_comm.size)  # a file is valid from the start
    with pytest.raises(OSError, match=rf"rank 0 of {mpi_comm.size}, trace=.*: another communicator writes its"):
        Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder)
    first.close()
    assert len(everyones(mpi_comm, folder)) == mpi_comm.size
    with Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder) as comm:  # now it may be used again
        comm.barrier()
    assert len(everyones(mpi_comm, folder)) == mpi_comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("piece_bytes", [None, 512], ids=["walked", "executed"])
def test_a_call_that_does_not_end_can_be_looked_at(
    mpi_comm: MPI.Intracomm, folder: Path, piece_bytes: int | None
) -> None:
    """The last rank stays away from the second sum, of which no check is made."""
    comm = Communicator(mpi_comm, "ring", timeout=2.0, verify=False, piece_bytes=piece_bytes, trace=folder)
    comm.allreduce(np.ones(100))
    comm.arrival_timeout = 0.5
    if comm.rank < comm.size - 1:
        with pytest.raises(CollectiveTimeout):
            comm.allreduce(np.ones(100))
    mpi_comm.Barrier()  # until the others have given up
    if comm.rank == comm.size - 1:
        flush()  # stands for atexit
    trace = everyones(mpi_comm, folder)[comm.rank]
    unfinished = [event for event in trace["traceEvents"] if event.get("args", {}).get("finished") is False]
    if comm.rank < comm.size - 1:
        assert {"call", "wait"} < {event["cat"] for event in unfinished}
        (stuck,) = [event for event in unfinished if event["cat"] == "wait"]
        assert stuck["dur"] > 0.3e6
        # nothing comes from the left; messages to the right may be stuck as well
        messages = {(event["cat"], event["args"]["peer"]) for event in unfinished if event["ph"] == "b"}
        assert messages <= {("receive", (comm.rank - 1) % comm.size), ("send", (comm.rank + 1) % comm.size)}
    else:
        assert not unfinished
    assert len(trace["otherData"]["clock"]) == 1


def test_an_exception_leaves_a_trace(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    def fail() -> None:
        with Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder) as comm:
            comm.allreduce(np.ones(1000))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for trace in everyones(mpi_comm, folder):
        assert [s["name"] for s in spans(trace, "call")] == ["allreduce"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have no room for traces from then on."""

    def write(self: Trace) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(Trace, "_write", write)


def unwritten(comm: MPI.Intracomm, folder: Path) -> str:
    here = f"rank {comm.rank} of {comm.size}: the trace {folder / f'rank-{comm.rank}.json'}"
    return f"{here} cannot be written (No space left on device); make room there or name another folder"


def test_a_trace_that_cannot_be_written_hides_no_error(
    mpi_comm: MPI.Intracomm, folder: Path, full: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        with Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder / "left"):
            full()
            raise KeyError

    failing = Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder / "failing")
    with pytest.raises(KeyError):
        fail()
    failing.ending.give_up(KeyError())
    told = [message for message in caplog.messages if "cannot be written" in message]
    assert told == [unwritten(mpi_comm, folder / name) for name in ("left", "failing")]


def test_a_trace_that_cannot_be_written_is_an_error_of_closing(
    mpi_comm: MPI.Intracomm, folder: Path, full: Callable[[], None]
) -> None:
    comm = Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder)
    full()
    with pytest.raises(OSError) as caught:
        comm.close()
    assert str(caught.value) == unwritten(mpi_comm, folder)
    comm.close()  # it is closed


@pytest.mark.mpi(min_size=2)
def test_a_message_in_flight_at_closing_lets_all_ranks_write_theirs(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with Communicator(mpi_comm, "ring", TIMEOUT_S, trace=folder, ranks_per_node=2) as comm:
        assert comm.nodes  # which all ranks close too
        message = comm.irecv(np.empty(1), 1) if comm.rank == 0 else None
    with pytest.raises(CommunicatorClosed) if message else nullcontext():
        assert message is None or message.wait()
    assert len(everyones(mpi_comm, folder)) == mpi_comm.size


@pytest.mark.mpi(min_size=2)
def test_memory_is_bounded_and_the_newest_events_stay(
    mpi_comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.trace.recorder.MOST_EVENTS", 50)
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=512, trace=folder) as comm:
        aggregator = Marsit(full_precision_every=None).start(comm, N)
        for _ in range(10):
            aggregator.aggregate(vector(comm.rank))
    for trace in everyones(mpi_comm, folder):
        assert not trace["otherData"]["complete"]
        messages = [event for event in trace["traceEvents"] if event["ph"] == "b"]
        assert len(spans(trace)) + len(messages) == 50
        assert max(event["args"]["call"] for event in spans(trace, "decode")) == 10
        RankTrace.of(trace)


def test_without_a_trace_nothing_is_recorded(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **named: Any) -> Any:
        raise AssertionError("recorded without being asked to")

    for name in ("begin_wait", "span", "around", "phases", "__init__"):
        monkeypatch.setattr(Trace, name, never)
    monkeypatch.setattr("collectives.trace.recorder.Trace.around_run", never)
    assert type(comm) is Communicator
    Marsit().start(comm, 1000).aggregate(vector(comm.rank, 1000))
    comm.iallreduce(np.ones(100)).wait()


def test_what_is_traced_is_let_go_without_the_garbage_collector(
    mpi_comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.group.routes.MOST_REMEMBERED", 1)
    with Communicator(mpi_comm, "ring", TIMEOUT_S, piece_bytes=512, trace=folder) as comm:
        aggregator: Any = CascadingSSDM().start(comm, N)
        aggregator.aggregate(vector(comm.rank))
        kept = [weakref.ref(aggregator), weakref.ref(aggregator.reducer.program)]
        gc.disable()
        try:
            del aggregator
            # its program takes the place of the other's
            CascadingSSDM().start(comm, 1000).aggregate(vector(comm.rank, 1000))
            assert [one() for one in kept] == [None, None]
            assert comm.trace is not None
            assert len(comm.trace.labels) == 1
        finally:
            gc.enable()
