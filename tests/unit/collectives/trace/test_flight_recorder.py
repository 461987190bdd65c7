"""Flight recorder: records of calls, and files that are written whatever happens, or not at all."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest

import mpicomp
from collectives import CollectiveMismatch, CollectiveTimeout, Communicator
from collectives.trace import flight_recorder
from collectives.trace.flight_recorder import FOLDER, MOST_RECORDS, FlightRecorder, folder_of_errors, recorder_here


def newest(comm: Communicator) -> dict[str, Any]:
    """Return the newest record of this rank, as a file has it."""
    found: dict[str, Any] = recorder_here().snapshot("test")
    return found["calls"][-1] | {"text": found["texts"][found["calls"][-1]["text"]]}


def test_a_record_has_name_array_and_times_of_a_call() -> None:
    def body(comm: Communicator) -> dict[str, Any]:
        comm.allreduce(np.ones((3, 5), np.float32), op="max")
        return newest(comm)

    for call in mpicomp.run_local(3, body):
        assert (call["call"], call["state"]) == (1, "ended")
        assert (call["dtype"], call["shape"], call["bytes"]) == ("float32", [3, 5], 60)
        assert call["text"].startswith("allreduce(max) of float32[3, 5]")
        assert 0 < call["begun"] <= call["compared"] <= call["ended"]


def test_the_newest_calls_are_kept_and_numbered_on_each_communicator() -> None:
    def body(comm: Communicator) -> tuple[dict[str, Any], list[int]]:
        for _ in range(MOST_RECORDS):
            comm.barrier()
        with comm.split(comm.rank % 2) as part:
            part.barrier()
            return recorder_here().snapshot("test"), list(part.calls.history.members)

    found = mpicomp.run_local(4, body)
    for rank, (content, members) in enumerate(found):
        assert members == [rank % 2, rank % 2 + 2]
        assert len(content["calls"]) == MOST_RECORDS
        assert content["calls"][-1]["call"] == 1
        assert content["calls"][-2]["call"] == MOST_RECORDS + 1  # the split
        assert content["calls"][0]["call"] == 3
    keys = [[one["key"] for one in content["communicators"]] for content, _ in found]
    assert keys[0] == keys[2]
    assert keys[1] == keys[3]
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]


def test_neither_vectors_nor_communicators_are_kept_alive() -> None:
    vectors, communicators = [], []

    def body() -> None:
        with Communicator() as comm:
            method = mpicomp.Marsit().start(comm, 1000)
            x = np.ones(1000, np.float32)
            method.aggregate(x)
            comm.iallreduce(x).wait()
            vectors.append(ref(x))
            communicators.append(ref(comm))

    body()
    gc.collect()
    assert vectors[0]() is None
    assert communicators[0]() is None
    texts = recorder_here().snapshot("test")["texts"]
    assert any(text.startswith("aggregate of float32[1000]") for text in texts)


def test_a_call_in_flight_describes_what_it_waits_for() -> None:
    def late(comm: Communicator) -> dict[str, Any] | None:
        handle = comm.iallreduce(np.ones(3)) if comm.rank == 0 else None
        found = None
        if handle is not None:
            handle.poll()
            found = newest(comm)
            comm.send(np.empty(1), to=1)
        else:
            comm.recv(np.empty(1), source=0)
            handle = comm.iallreduce(np.ones(3))
        handle.wait()
        return found

    found = mpicomp.run_local(2, late)[0]
    assert found is not None
    assert found["state"] == "begun"
    assert "not all ranks have come to call 1" in found["waits_for"]


def test_failed_calls_have_their_error() -> None:
    def body(comm: Communicator) -> dict[str, Any]:
        with pytest.raises(CollectiveMismatch):
            comm.allreduce(np.ones(2 + comm.rank))
        return newest(comm)

    assert [(one["state"], one["error"]) for one in mpicomp.run_local(2, body)] == [
        ("failed", "CollectiveMismatch")
    ] * 2


def wait_for_ever(comm: Communicator) -> None:
    """Wait for each other in different calls, up to the timeout."""
    if comm.rank:
        comm.barrier()
    else:
        comm.recv(np.empty(1), source=1)


LIMITS = {"timeout": 0.2, "arrival_timeout": 0.2}


def test_a_timeout_of_threads_leaves_files_only_where_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(CollectiveTimeout) as caught:
        mpicomp.run_local(2, wait_for_ever, **LIMITS)
    assert "analyze" not in str(caught.value)
    assert not list(tmp_path.glob("mpicomp-flight*"))
    monkeypatch.setenv(FOLDER, str(tmp_path / "a" / "b"))
    with pytest.raises(CollectiveTimeout, match=r"mpicomp analyze .*a/b shows the calls of all ranks"):
        mpicomp.run_local(2, wait_for_ever, **LIMITS)
    content = json.loads((tmp_path / "a" / "b" / "flight-1.json").read_text())
    assert content["reason"].startswith("CollectiveTimeout: rank 1 of 2")
    assert content["calls"][-1]["state"] == "begun"
    assert content["threads"][0]["main"]


@pytest.mark.parametrize("place", ["a folder", "a FIFO", "a file for a folder", "a full disk"])
def test_no_problem_of_the_file_hides_the_error_or_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "flights"
    path = folder / "flight-0.json"
    if place == "a file for a folder":
        folder.write_text("")
    else:
        folder.mkdir()
    if place == "a folder":
        path.mkdir()
    elif place == "a FIFO":
        os.mkfifo(path)
    elif place == "a full disk":
        folder = Path("/dev/full")
    monkeypatch.setenv(FOLDER, str(folder))
    named = FlightRecorder(0, 2).write_after(CollectiveTimeout("late"))
    assert named == (str(folder) if place == "a FIFO" else "")
    if place == "a FIFO":
        assert json.loads(path.read_text())["reason"] == "CollectiveTimeout: late"


def test_a_folder_that_hangs_delays_the_error_for_a_short_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(flight_recorder, "WRITING_S", 0.05)
    monkeypatch.setattr(flight_recorder, "_make_folder", lambda folder: os.read(reading, 1))
    assert FlightRecorder(0, 2).write_after(CollectiveTimeout("late")) == ""
    os.write(writing, b" ")


def test_files_of_processes_go_to_a_folder_of_their_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = FlightRecorder()
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setattr(flight_recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host/7@1")
    recorder._place = 0, 2
    assert folder_of_errors(recorder) == tmp_path / f"mpicomp-flight-{os.getuid()}-prterun-host-7-1"
    recorder._place = 0, 1
    assert folder_of_errors(recorder) is None  # alone
    monkeypatch.setenv(FOLDER, "")
    recorder._place = 0, 2
    assert folder_of_errors(recorder) is None  # switched off


PROGRAM = """
import os, signal, sys
import mpicomp, numpy as np
if sys.argv[1] == "stop_requested":
    comm = mpicomp.Communicator()
    comm.stop_requested()
    comm.allreduce(np.ones(3))
elif sys.argv[1] == "calls":
    comm = mpicomp.Communicator()
    comm.allreduce(np.ones(3))
else:
    from collectives import Communicator
if sys.argv[1] == "fork":
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
    sys.exit()
os.kill(os.getpid(), signal.SIGUSR1)
print("went on", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("not ended", flush=True)
"""


@pytest.mark.parametrize("kind", ["none", "calls", "stop_requested", "fork"])
def test_signals_leave_a_file_before_and_after_the_first_call(tmp_path: Path, kind: str) -> None:
    env = os.environ | {FOLDER: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], env=env, capture_output=True, text=True, timeout=100)
    path = tmp_path / "flight-0.json"
    if kind == "fork":  # a process that was forked is no rank, and ends by the signal
        assert done.stdout == f"{-signal.SIGTERM}\n", done.stderr
        assert not path.exists()
        return
    assert done.stdout == ("went on\nnot ended\n" if kind == "stop_requested" else "went on\n"), done.stderr
    assert done.returncode == (0 if kind == "stop_requested" else -signal.SIGTERM)
    content = json.loads(path.read_text())
    assert content["reason"] == "SIGTERM"
    assert len(content["calls"]) == {"none": 0, "calls": 1, "stop_requested": 2}[kind] + (
        1 if kind == "stop_requested" and content["texts"][-1] == "close()" else 0
    )
    assert any("<string>" in line for line in content["threads"][0]["stack"])
