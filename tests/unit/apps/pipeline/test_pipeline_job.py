"""Whole jobs of apps.pipeline under mpirun: errors that all ranks have, and a run that is killed and resumed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.unit.faults.jobs import JOB_S, Jobs, jobs

__all__ = ["jobs"]

pytestmark = pytest.mark.timeout(4 * JOB_S)

RANKS = 2
SMALL = [
    "--stages=2", "--layers=2", "--width=16", "--heads=2", "--context=16", "--characters=3000", "--batch=8",
    "--micro-batches=2",
]  # fmt: skip

# Arguments, the exit status, and the error.
ERRORS = (
    ("--forward-bits 9", 2, "argument --forward-bits: invalid choice: 9"),
    ("--stages 4 --layers 4", 1, "a grid of replica=1 x stage=4 has 4 ranks, and there are 2"),
    ("--text {folder}/nowhere", 1, "rank 0 of 2: .*nowhere"),
    ("--characters 50", 1, "rank 0 of 2: Python's standard library has 50 characters"),
    ("--weights {folder}/nowhere", 1, "rank 0 of 2: .*nowhere"),
    ("--weights {folder}/a-file", 1, "rank 0 of 2: .*a-file is no file of weights"),
    ("--json {folder}/a-file/run.json --epochs 1", 1, "cannot write .*--json file"),
)
ALL_ERRORS = """
from apps.pipeline.__main__ import main
statuses = [main(argv) for argv in CASES]
tell(f"statuses-{mpicomp.Communicator().rank}", statuses)
"""


def test_an_error_is_printed_once_with_its_cure(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    cases = [[*SMALL, *text.format(folder=tmp_path).split()] for text, _, _ in ERRORS]
    job = jobs.run_warm(RANKS, ALL_ERRORS, CASES=cases)
    _, output = job.finish()
    assert "Traceback" not in output
    statuses = str([status for _, status, _ in ERRORS])
    assert [job.told(f"statuses-{rank}") for rank in range(RANKS)] == [statuses] * RANKS, output
    errors = [line for line in output.splitlines() if "error: " in line]
    for error, (_, _, message) in zip(errors, ERRORS, strict=True):
        assert re.search(message, error), error


def test_a_killed_run_with_files_of_messages_is_resumed(jobs: Jobs, tmp_path: Path) -> None:
    checkpoints, record = tmp_path / "checkpoints", tmp_path / "run.json"

    common = ["--store", "disk", "--checkpoint", str(checkpoints), "--epochs", "500"]

    job = jobs.start(RANKS, ["-m", "apps.pipeline", *SMALL, *common])
    job.wait_for(lambda: len(list(checkpoints.glob("step-*"))) > 1, "saved two epochs")
    os.kill(job.ranks()[-1], signal.SIGKILL)
    ended, output = job.finish()
    assert ended != 0
    (newest,) = (sorted(checkpoints.glob("step-*"))[-1:],)
    epoch = int(newest[0].name.removeprefix("step-"))

    resumed = [*SMALL, *common, "--resume", "--stop-after", str(epoch + 2), "--json", str(record)]
    job = jobs.run(RANKS, ALL_ERRORS, CASES=[resumed, [*SMALL, *common, "--stop-after", "1"]])
    _, output = job.finish()
    assert [job.told(f"statuses-{rank}") for rank in range(RANKS)] == ["[0, 1]"] * RANKS, output
    assert f"resumed from {newest[0]}" in output
    found = json.loads(record.read_text())
    assert [each["epoch"] for each in found["epochs"]] == list(range(1, epoch + 3))
    assert found["cuts_alike"]
    assert "holds checkpoints of an earlier run; add --resume" in output
