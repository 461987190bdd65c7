"""Jobs that take turns: paused ones do nothing, and their lines are read while they are written."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from apps.chaos.running_job import RunningJob, make_folder

LONGEST_S = 60.0
PROGRAM = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time; print('here', flush=True); time.sleep(1000)"])
"""


def state_of(pid: int) -> str:
    """Return the state of a process; Z: it has ended, perhaps without a parent that collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def await_states(processes: list[int], states: set[str]) -> None:
    """Wait for these states of the processes: a signal takes effect once its process gets a processor."""
    end = time.monotonic() + LONGEST_S
    while (found := {state_of(pid) for pid in processes}) != states:
        assert time.monotonic() < end, f"{found}, not {states}"
        time.sleep(0.01)


def test_all_processes_of_a_paused_job_are_stopped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    job = RunningJob([sys.executable, "-S", "-c", PROGRAM], os.environ, folder)
    try:
        end = time.monotonic() + LONGEST_S
        while not (folder / "output").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        found = job.processes()
        job.pause()
        await_states(found, {"T"})
        job.resume()
        await_states(found, {"S"})
    finally:
        job.end()
    assert not folder.exists()
    await_states(found, {"Z"})
