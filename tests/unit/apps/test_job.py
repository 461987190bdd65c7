"""Whole jobs under mpirun: their exit status, their one error line, and that they stop when asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from apps.launch import mpi_environment, mpirun_command

PROJECT = Path(__file__).resolve().parents[3]
RANKS = 2
# Two ranks that import torch and compile nothing take seconds, on a busy machine a minute.
JOB_S = 120.0

pytestmark = pytest.mark.timeout(3 * JOB_S)


def start(*argv: str) -> subprocess.Popen[str]:
    command = [*mpirun_command(RANKS), sys.executable, "-m", "apps.train", "--hidden", "16", *argv]
    environment = mpi_environment() | {"PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=PROJECT
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = job.communicate(timeout=JOB_S)
    except subprocess.TimeoutExpired:
        job.terminate()
        raise
    return job.returncode, out, err


def test_an_error_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    status, _, err = finish(start("--dataset", "idx", "--data", str(tmp_path / "missing")))
    assert status == 1
    assert err.count("error: ") == 1
    assert f"error: rank 0 of {RANKS}: there is no folder {tmp_path / 'missing'}; correct --data DIR" in err
    assert "Traceback" not in err


def test_a_topology_that_does_not_exist_is_told_once() -> None:
    status, _, err = finish(start("--topology", "mesh"))
    assert status == 1
    assert err.count("error: --topology mesh") == 1
    assert "Traceback" not in err


def test_usr1_to_mpirun_saves_and_ends_with_status_0_and_resume_goes_on(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    argv = ("--epochs", "400", "--checkpoint", str(tmp_path / "checkpoints"), "--json", str(record))
    job = start(*argv, "--checkpoint-every", "400")
    deadline = time.monotonic() + JOB_S
    while not (record.exists() and record.stat().st_size) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)
    status, out, err = finish(job)
    assert status == 0, err
    assert "stopped by a signal after step" in out
    assert "\x1b" not in out, "escape sequences have no place in a log file"
    (saved,) = (tmp_path / "checkpoints").iterdir()
    done = len(record.read_text().splitlines())
    status, out, err = finish(start(*argv[2:], "--epochs", str(done + 1), "--resume"))
    assert status == 0, err
    assert f"resumed from {saved}" in out
    assert [json.loads(line)["kind"] for line in record.read_text().splitlines()] == ["epoch"] * (done + 1) + ["result"]


def test_trains_without_mpirun(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    command = [sys.executable, "-m", "apps.train", "--epochs", "1", "--json", str(record)]
    subprocess.run(command, check=True, capture_output=True, timeout=JOB_S, cwd=PROJECT, env=os.environ)
    last = json.loads(record.read_text().splitlines()[-1])
    assert (last["ranks"], last["bits_per_element"]) == (1, 0.0)
