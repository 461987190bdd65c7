"""Ranks of pipelines that die: the survivors' checkpoint, and a training that goes on from it to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Jobs

torch = pytest.importorskip("torch")
from tests.unit.faults.staged_training import STAGES, train  # noqa: E402 - imports PyTorch

pytestmark = pytest.mark.timeout(2 * JOB_S)
LAST = 6

PROGRAM = """
import torch
from mpicomp.pipeline import StageLost
from tests.unit.faults.staged_training import train
torch.set_num_threads(1)
comm = mpicomp.Communicator(timeout=NEVER_S, arrival_timeout=NEVER_S)
tell(f"pid-{comm.rank}", os.getpid())
seen = []
def strike(step, phase):
    seen.append((step, phase))
    if comm.rank in DEAD and (step, phase) == AT and seen.count(AT) == COUNT:
        os.kill(os.getpid(), signal.SIGKILL)
try:
    train(comm, FOLDER / "saved", LAST, strike, every=EVERY)
except StageLost as error:
    tell(f"error-{comm.rank}", f"{error}; {error.ranks}, {error.places}, {error.step}")
    raise
"""


def resumed(ranks: int, folder: Path, last: int = LAST) -> list[dict[str, Any]]:
    """Return the ends of a training on threads that goes on from the checkpoint in a folder."""
    return mpicomp.run_local(ranks, lambda comm: train(comm, folder, last))


def require_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], dead: int | None = None) -> None:
    """Compare the ends of two trainings; a rank that died has had the running statistics of its twin."""
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one["parameters"] == other["parameters"]
        assert rank == dead or one["buffers"] == other["buffers"]
        assert one["moments"] == other["moments"]
        assert one["steps"] == other["steps"]
        assert one["messages"].keys() == other["messages"].keys()
        for name, coding in other["messages"].items():
            store, same = one["messages"][name].get("store"), coding.get("store")
            if same is not None:
                np.testing.assert_array_equal(store["stamps"], same["stamps"])
                np.testing.assert_array_equal(store["rows"], same["rows"])


def errors_of(jobs: Jobs, ranks: int, dead: list[int], at: tuple[int, str], count: int = 1, every: int = 1000) -> str:
    """Run a job whose ranks die; returns the error that all survivors raise."""
    job = jobs.run_warm(ranks, PROGRAM, DEAD=dead, AT=at, COUNT=count, EVERY=every, LAST=LAST)
    status, output = job.finish()
    assert status != 0, output
    texts = {job.told(f"error-{rank}").partition(": ")[2] for rank in range(ranks) if rank not in dead}
    assert len(texts) == 1, texts
    return texts.pop()


def test_replicas_go_on_to_the_bit_from_the_step_that_all_survivors_have_made(jobs: Jobs, tmp_path: Path) -> None:
    text = errors_of(jobs, 4, [3], (3, "forward"), count=3)  # in the middle of a step
    assert "rank 3, stage 1 of replica 1, died after step 3; all stages are saved after this step in" in text
    ended = resumed(4, tmp_path / "saved")
    assert {one["begun"] for one in ended} == {3}
    require_same(ended, resumed(4, tmp_path / "undisturbed"), dead=3)


def test_a_stage_without_other_replicas_goes_on_from_the_last_checkpoint_of_all(jobs: Jobs, tmp_path: Path) -> None:
    text = errors_of(jobs, STAGES, [0], (3, "optimizer"), every=2)
    assert "rank 0, stage 0 of replica 0, died after step 3; no other replica has the state of stage 0" in text
    assert f"the newest checkpoint of all stages is {tmp_path / 'saved' / 'step-00000002'}" in text
    ended = resumed(STAGES, tmp_path / "saved")
    assert {one["begun"] for one in ended} == {2}
    require_same(ended, resumed(STAGES, tmp_path / "undisturbed"))
