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
subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])
"""


def state_of(pid: int) -> str:
    """Return the state of a process; Z: it has ended, perhaps without a parent that collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_all_processes_of_a_paused_job_are_stopped(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    job = RunningJob([sys.executable, "-S", "-c", PROGRAM], os.environ, folder)
    try:
        end = time.monotonic() + LONGEST_S
        while len(found := job.processes()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        job.pause()
        assert [state_of(pid) for pid in found] == ["T", "T"]
        job.resume()
        assert "T" not in [state_of(pid) for pid in found]
    finally:
        job.end()
    assert not folder.exists()
    end = time.monotonic() + LONGEST_S
    while {state_of(pid) for pid in found} != {"Z"}:
        assert time.monotonic() < end, "a process has not ended with its job"
        time.sleep(0.01)
