"""Workers: pieces are worked on at the same time, the calling thread moves messages meanwhile, errors come through."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives import Communicator, Ring
from collectives.execution.call import Call
from collectives.execution.jobs import in_parts
from collectives.execution.pipelined import execute
from collectives.execution.program import gather_program
from collectives.execution.traffic import Traffic
from collectives.execution.workers import worker_number
from collectives.threads.run_local import run_local
from mpicomp import QSGD, Marsit, NonFiniteGradient

PATIENCE_S = 5.0


class Pieces:
    """A payload of one byte a piece, gathered; what encodes and finishes a piece is given. See `Payload`."""

    receive_buffers, brief = 0, False

    def __init__(self, count: int, encode: Any = None, finish: Any = None) -> None:
        self._sent, self._finished = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
        self._encode, self._finish = encode, finish
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    @property
    def bytes(self) -> Any:
        """Of each piece 1 where it has been encoded or received, and 1 more where it has been finished."""
        return self._sent + self._finished

    def _work(self, work: Any, piece: int) -> None:
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            if work is not None:
                work(piece)
        finally:
            with self._lock:
                self.running -= 1

    def encode(self, piece: int) -> None:
        self._work(self._encode, piece)
        self._sent[piece] = 1

    def finish(self, piece: int) -> None:
        self._work(self._finish, piece)
        self._finished[piece] += self._sent[piece]  # in other memory: what is being sent must be left alone

    def outgoing(self, piece: int, weight: int) -> Any:
        return [self._sent[piece : piece + 1], 1, MPI.BYTE]

    replacing = outgoing


def gather(comm: Communicator, payload: Pieces, traffic: Traffic | None = None) -> None:
    """Run the payload's pieces, of which every rank has as many."""
    count = payload.bytes.size // comm.size
    program = gather_program(comm.rank, comm.size, [range(k, k + 1) for k in range(count)])
    call = Call(comm, lambda: "a gather")
    comm.run(call, execute(call, program, payload, comm.fixed_tag(), traffic or Traffic()))


def do_parts(comm: Communicator, work: Any, count: int, traffic: Traffic) -> None:
    """Have work done on parts 0 to count - 1."""
    call = Call(comm, lambda: "work")
    comm.run(call, in_parts(call, traffic, "seconds_encoding", work, range(count), comm.workers))


@pytest.mark.parametrize("threads", [1, 3])
def test_parts_are_worked_on_by_as_many_threads_as_there_are(threads: int) -> None:
    meeting, done, traffic = threading.Barrier(threads), [], Traffic()

    def work(part: int) -> None:
        meeting.wait(PATIENCE_S)
        time.sleep(0.002)
        done.append((part, worker_number() > 0))

    with Communicator(threads=threads) as comm:
        do_parts(comm, work, 6, traffic)
    assert sorted(done) == [(part, threads > 1) for part in range(6)]
    assert traffic.seconds_encoding >= 0.012


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_a_part_is_raised_by_the_call(threads: int) -> None:
    def work(part: int) -> None:
        raise MemoryError(f"no room for part {part}")

    with Communicator(threads=threads) as comm, pytest.raises(MemoryError, match="no room for part"):
        do_parts(comm, work, 6, Traffic())


def test_time_that_workers_take_for_parts_is_no_waiting() -> None:
    with Communicator(threads=2) as comm:
        call = Call(comm, lambda: "work")
        parts = in_parts(call, Traffic(), "seconds_encoding", lambda part: time.sleep(0.1), range(2), comm.workers)
        begun = time.perf_counter()
        comm.run(call, parts)
        assert call.waited_s < (time.perf_counter() - begun) / 2


def test_as_many_pieces_as_workers_are_encoded_and_finished_at_the_same_time() -> None:
    meeting = threading.Barrier(3)
    payload = Pieces(6, lambda piece: meeting.wait(PATIENCE_S), lambda piece: meeting.wait(PATIENCE_S))
    with Communicator(threads=3) as comm:
        gather(comm, payload)
    assert payload.most_running == 3
    assert (payload.bytes == 2).all()


def test_with_one_thread_the_calling_one_does_it_all() -> None:
    found = []
    payload = Pieces(3, lambda piece: found.append((threading.get_ident(), worker_number())))
    with Communicator() as comm:
        gather(comm, payload)
    assert found == [(threading.get_ident(), 0)] * 3


def test_workers_are_numbered_and_none_is_the_calling_thread() -> None:
    meeting, found = threading.Barrier(2), []

    def encode(piece: int) -> None:
        meeting.wait(PATIENCE_S)
        found.append((worker_number(), threading.current_thread() is threading.main_thread()))

    with Communicator(threads=2) as comm:
        gather(comm, Pieces(2, encode))
    assert sorted(found) == [(1, False), (2, False)]


def test_messages_go_out_while_all_workers_are_busy() -> None:
    """The second piece is not encoded before the other rank has the first one."""
    arrived = [threading.Event(), threading.Event()]

    def take(comm: Communicator) -> int:
        own, other = comm.rank, 1 - comm.rank

        def encode(piece: int) -> None:
            if piece % 2:
                assert arrived[own].wait(PATIENCE_S), "the other rank has not got the first piece"

        def finish(piece: int) -> None:
            if piece == 2 * other:
                arrived[other].set()

        payload = Pieces(4, encode, finish)
        gather(comm, payload)
        return int(payload.bytes.sum())

    assert run_local(2, take, Ring(), threads=2, timeout=PATIENCE_S) == [8, 8]


def test_an_error_of_a_worker_is_raised_by_the_call_once_the_other_workers_are_done() -> None:
    def encode(piece: int) -> None:
        if piece == 0:
            raise MemoryError("no room for a piece")
        time.sleep(0.05)

    payload = Pieces(4, encode)
    with pytest.raises(MemoryError, match="no room for a piece"), Communicator(threads=2) as comm:
        gather(comm, payload)
    assert payload.running == 0


def test_a_piece_that_a_device_works_on_goes_on_when_the_device_is_done() -> None:
    """Also where a worker has handed it to the device."""

    class OnDevice:
        asked = 0

        def Test(self) -> bool:  # noqa: N802 - MPI's name
            self.asked += 1
            return self.asked > 5

    class There(Pieces):
        def encode(self, piece: int) -> Any:
            super().encode(piece)
            self.pending = OnDevice()
            return self.pending

        def finish(self, piece: int) -> Any:
            assert self.pending.asked > 5
            super().finish(piece)
            return OnDevice()

    for threads in (1, 2):
        payload = There(1)
        with Communicator(threads=threads) as comm:
            gather(comm, payload)
        assert payload.bytes == 2


def test_pieces_that_no_worker_has_begun_are_left_undone_after_an_error() -> None:
    begun = []

    def encode(piece: int) -> None:
        begun.append(piece)
        time.sleep(0.05)
        if piece == 0:
            raise MemoryError("no room for a piece")

    with pytest.raises(MemoryError), Communicator(threads=1 + 1) as comm:
        gather(comm, Pieces(20, encode))
    assert len(begun) <= 6  # of two workers, each with one piece to go on with


def test_where_no_thread_can_be_started_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Communicator(threads=2) as comm, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            gather(comm, Pieces(2))


def test_a_piece_that_takes_longer_than_the_timeout_is_no_stall() -> None:
    """Both ranks compute, and look for each other's messages meanwhile."""

    def take(comm: Communicator) -> int:
        payload = Pieces(4, lambda piece: time.sleep(1.2))
        gather(comm, payload)
        return int(payload.bytes.sum())

    assert run_local(2, take, Ring(), threads=2, timeout=0.5, arrival_timeout=60.0) == [8, 8]


def test_a_forked_process_does_not_wait_for_the_workers_of_its_parent() -> None:
    """A process is forked while a call is in flight: in the child the call ends."""
    going_on = threading.Event()
    with Communicator(threads=2) as comm:
        call = Call(comm, lambda: "a gather")
        program = gather_program(0, 1, [range(1), range(1, 2)])
        payload = Pieces(2, lambda piece: going_on.wait(PATIENCE_S))
        handle = comm.begin(call, execute(call, program, payload, comm.fixed_tag(), Traffic()))
        while not payload.running:
            handle.poll()
        child = os.fork()
        if not child:
            os._exit(0)  # had the call waited for workers, the child would not have come here
        deadline = time.monotonic() + PATIENCE_S
        ended = (0, 0)
        while not ended[0] and time.monotonic() < deadline:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        going_on.set()
        handle.wait()
    assert ended == (child, 0)


def test_threads_end_with_a_communicator_that_fails() -> None:
    before = threading.active_count()
    with Communicator(threads=3) as comm:
        gather(comm, Pieces(3))
        comm.ending.give_up(ValueError("of the caller"))
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_seconds_of_workers_are_counted_by_phase_and_are_no_waiting() -> None:
    traffic = Traffic()
    with Communicator(threads=2) as comm:
        gather(comm, Pieces(8, lambda piece: time.sleep(0.1), lambda piece: time.sleep(0.05)), traffic)
    assert traffic.seconds_encoding >= 0.8
    assert traffic.seconds_decoding >= 0.4
    assert traffic.seconds_total < traffic.seconds_encoding + traffic.seconds_decoding
    assert traffic.seconds_waiting < traffic.seconds_total / 2


@pytest.mark.parametrize("method", [Marsit(full_precision_every=None), QSGD()])
def test_a_step_with_nan_is_refused_on_all_ranks_and_can_be_repeated(method: Any) -> None:
    n = 300_000

    def take(comm: Communicator) -> bool:
        aggregator = type(method)(**{"transactional": True} if type(method) is Marsit else {}).start(comm, n)
        x = np.random.default_rng(comm.rank).standard_normal(n).astype(np.float32)
        aggregator.aggregate(x)
        before = aggregator.state_dict()
        bad = x.copy()
        bad[n // 2 * comm.rank] = np.nan
        with pytest.raises(NonFiniteGradient):
            aggregator.aggregate(bad)
        after = aggregator.state_dict()
        assert before.keys() == after.keys()
        aggregator.aggregate(x)
        return all(np.array_equal(before[key], after[key]) for key in before)

    assert run_local(2, take, Ring(), threads=2, piece_bytes=4096) == [True, True]


def encoding_tracks(folder: Path) -> list[str]:
    """Of each encoding in rank 0's trace the name of its track."""
    events = json.loads((folder / "rank-0.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[0] == "calls"
    return [names[event["tid"]] for event in events if event.get("cat") == "encode"]


def test_a_trace_shows_each_worker_on_a_track_of_its_own(tmp_path: Path) -> None:
    n = 300_000
    with Communicator(threads=2, trace=tmp_path) as comm:
        QSGD().start(comm, n).aggregate(np.ones(n, np.float32))
    encoding = encoding_tracks(tmp_path)
    assert encoding
    assert {*encoding} <= {"worker 1", "worker 2"}  # one alone may have done it all


@pytest.mark.parametrize("threads", [1, 2])
def test_a_trace_shows_the_parts_of_a_vector(tmp_path: Path, threads: int) -> None:
    with Communicator(threads=threads, trace=tmp_path) as comm:
        do_parts(comm, lambda part: None, 6, Traffic())
    encoding = encoding_tracks(tmp_path)
    assert len(encoding) == 6
    assert {*encoding} <= ({"calls"} if threads == 1 else {"worker 1", "worker 2"})
