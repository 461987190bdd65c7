"""Faults as data: schedules that a seed determines and a command line takes, and faults that happen where they say."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import numpy as np
import pytest
from mpi4py import MPI

import mpicomp
from apps.faults import (
    Fault,
    Injector,
    Kind,
    Phase,
    corrupt_at,
    disk_full_at,
    fail_at,
    injector,
    parse_schedule,
    random_faults,
    slow_at,
    stop_at,
    write_schedule,
)


def test_schedules_are_read_as_they_were_written() -> None:
    faults = random_faults(7, 8, 400, kinds=[*Kind])
    assert {fault.kind for fault in faults} == {*Kind}
    assert parse_schedule(write_schedule(faults)) == faults


@pytest.mark.parametrize(
    "text",
    ["kill:0:1", "kill:0:1:lunch", "stop:0:1:middle", "slow:0:1:middle:-1", "kill:0:1:middle:3", "burn:0:1:middle"],
)
def test_a_text_that_is_no_fault_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=rf"'{text}': (a fault is KIND:RANK:STEP:PHASE|seconds of a slow)"):
        parse_schedule(text)


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_lives_on_and_dead_ones_have_no_faults(seed: int) -> None:
    faults = random_faults(seed, 3, 200, kinds=[Kind.KILL, Kind.SLOW])
    assert faults == random_faults(seed, 3, 200, kinds=[Kind.KILL, Kind.SLOW])
    dead: set[int] = set()
    for fault in faults:
        assert fault.rank not in dead
        if fault.kind is Kind.KILL:
            dead.add(fault.rank)
    assert len(dead) < 3


def test_faults_happen_to_their_rank_in_their_step_and_phase() -> None:
    schedule = [
        slow_at(0, 2, "before-call", 1e-3),
        slow_at(0, 1, "residual", 1e-3),
        stop_at(1, 0, "middle", 9),
        fail_at(2, 1),
    ]
    happened: list[tuple[int, str]] = []
    faults = Injector(schedule, 0, lambda fault: happened.append((step, fault.phase)))
    with faults.installed(), mpicomp.Communicator(faults.watch(MPI.COMM_WORLD)) as comm:
        top_k = mpicomp.LocalTopK(rate=2).start(comm, 10)
        for step in range(3):
            faults.begin(step)
            top_k.aggregate(np.ones(10, np.float32))
            faults.end()
    assert happened == [(1, "residual"), (2, "before-call")]


def test_a_late_kill_is_recorded_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    happened, died = list[str](), Event()
    monkeypatch.setattr(injector, "_kill", lambda fault: died.set())
    late = Fault(Kind.LATE_KILL, 0, 1, Phase.BEFORE_CALL, seconds=0.2)
    faults = Injector([late], 0, lambda fault: happened.append(str(fault)))
    faults.begin(1)
    assert not happened
    assert died.wait(30)
    assert happened == ["late-kill:0:1:before-call:0.2"]


def test_one_bit_of_one_message_is_flipped() -> None:
    faults = Injector([corrupt_at(0, 0, "before-call", 9)], 0)
    comm = faults.watch(MPI.COMM_SELF)
    faults.begin(0)
    found = []
    for _ in range(2):
        landing = np.empty(4, np.uint8)
        request = comm.Irecv(landing, 0)
        comm.Isend(np.zeros(4, np.uint8), 0).Wait()
        request.Wait()
        found.append(landing.tolist())
    assert found == [[0, 2, 0, 0], [0, 0, 0, 0]]


def test_a_full_disk_keeps_the_last_state(tmp_path: Path) -> None:
    faults, path = Injector([disk_full_at(0, 1)], 0), tmp_path / "state.npz"
    for step in range(2):
        faults.begin(step)
        with faults.checkpoint():
            if step == 0:
                mpicomp.save_state(path, {"step": step})
            else:
                with pytest.raises(OSError, match="No space left on device"):
                    mpicomp.save_state(path, {"step": step})
        faults.end()
    assert mpicomp.load_state(path)["step"] == 0
    assert [one.name for one in tmp_path.iterdir()] == ["state.npz"]


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="rank, step and bit of a fault are 0 or more, got -1, 0, 0"):
        fail_at(-1, 0)
    with pytest.raises(ValueError, match="seconds of a stop must be above 0 and finite, got 0"):
        stop_at(0, 0, "middle", 0)
    assert Fault.parse(str(corrupt_at(1, 2, "middle", 3))).bit == 3
