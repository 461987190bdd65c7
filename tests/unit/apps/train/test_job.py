"""Whole jobs under mpirun: their exit status, their one error line, and that they stop when asked to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.unit.faults.jobs import JOB_S, PROJECT, Job, Jobs

RANKS = 2

pytestmark = pytest.mark.timeout(4 * JOB_S)


def train(jobs: Jobs, *argv: str) -> Job:
    return jobs.start(RANKS, ["-m", "apps.train", "--hidden", "16", *argv])


def idx_folder(folder: Path, n_found: int) -> Path:
    """A dataset whose training images are announced as 64 and end after `n_found`."""
    folder.mkdir()
    for prefix in ("train", "t10k"):
        for name, shape in (("images-idx3", (64, 8, 8)), ("labels-idx1", (64,))):
            header = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
            content = bytes(n_found * 64 if (prefix, name) == ("train", "images-idx3") else int(np.prod(shape)))
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + content)
    return folder


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("--epochs", "0"), 2, "argument --epochs: 0 is not at least 1"),
        (("--topology", "torus:2x3"), 1, "--topology torus:2x3: 2 ranks do not fill a torus of 2 x 3 .* fit: 1 x 2"),
        (("--dataset", "idx", "--data", "{folder}/no"), 1, "rank 0 of 2: there is no folder .*; correct --data DIR"),
        (("--dataset", "idx", "--data", "{folder}/cut"), 1, "rank 0 of 2: .*/train-images.* is damaged: fetch it"),
        (("--lr", "1e30"), 3, r"training diverged: rank 0 of 2: NaN or infinity .*from ranks 0, 1; lower the learning"),
        (("--checkpoint", "{folder}/cut/t10k-labels-idx1-ubyte"), 1, "rank 0 of 2: cannot write .*--checkpoint folder"),
    ],
    ids=["usage", "torus", "missing", "truncated", "not finite", "no checkpoint folder"],
)
def test_an_error_of_all_ranks_is_told_once(
    jobs: Jobs, tmp_path: Path, argv: tuple[str, ...], status: int, message: str
) -> None:
    idx_folder(tmp_path / "cut", n_found=63)
    ended, output = train(jobs, *(argument.format(folder=tmp_path) for argument in argv)).finish()
    assert ended == status, output
    assert "Traceback" not in output
    (error,) = (line for line in output.splitlines() if "error: " in line)
    assert re.search(message, error), error


def kinds(record: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in record.read_text().splitlines()]


def epochs_done(job: Job, record: Path, n: int) -> None:
    """Wait until the job has trained `n` epochs."""
    job.wait_for(lambda: record.exists() and len(record.read_text().splitlines()) >= n, f"trained {n} epochs")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 1)])
def test_a_signal_to_mpirun_saves_the_run_and_resume_goes_on(
    jobs: Jobs, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    record, checkpoints = tmp_path / "run.json", tmp_path / "checkpoints"
    argv = ("--checkpoint", str(checkpoints), "--json", str(record), "--checkpoint-every", "1000")
    job = train(jobs, *argv, "--epochs", "1000")
    epochs_done(job, record, 1)
    job.process.send_signal(number)
    ended, output = job.finish()
    assert ended == status, output
    assert status != 0 or "stopped by a signal after step" in output
    assert "\x1b" not in output, "escape sequences have no place in a log file"
    saved = [path for path in checkpoints.iterdir() if path.suffix != ".partial"]
    assert len(saved) == 1 or number == signal.SIGTERM  # of which mpirun makes SIGKILL soon
    done = len(kinds(record))
    ended, output = train(jobs, *argv, "--epochs", str(done + 1), "--resume").finish()
    assert ended == 0, output
    if saved:
        assert f"resumed from {saved[0]}" in output
    assert kinds(record) == ["epoch"] * (done + 1) + ["result"]


def test_a_stopped_rank_ends_the_run_and_is_named_once(jobs: Jobs, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    job = jobs.start(3, ["-m", "apps.train", "--epochs", "1000", "--timeout", "2", "--json", str(record)])
    epochs_done(job, record, 1)
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    ended, output = job.finish()
    assert ended != 0
    (error,) = (line for line in output.splitlines() if "error: " in line)
    assert re.search(r"error: rank \d of 3[:,] .*(no answer from rank 1|nothing from rank)", error), error
    job.await_end(stopped)


def test_a_killed_rank_ends_the_run_and_its_checkpoints_stay_whole(jobs: Jobs, tmp_path: Path) -> None:
    record, checkpoints = tmp_path / "run.json", tmp_path / "checkpoints"
    argv = ("--checkpoint", str(checkpoints), "--json", str(record), "--checkpoint-every", "1steps")
    job = train(jobs, *argv, "--epochs", "1000")
    epochs_done(job, record, 1)
    os.kill(job.ranks()[-1], signal.SIGKILL)
    ended, output = job.finish()
    assert ended != 0
    assert "signal 9" in output, output
    done = len(kinds(record))
    ended, output = train(jobs, *argv, "--epochs", str(done + 1), "--resume").finish()
    assert ended == 0, output
    assert "resumed from" in output


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


# From the first checkpoint on, files of this process may grow no further: a disk that is full, but not yet for MPI.
FULL_DISK = """
import resource
from apps.train import checkpoint
from apps.train.__main__ import main
save = checkpoint.save
def save_on_a_full_disk(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
    return save(*args)
checkpoint.save = save_on_a_full_disk
sys.exit(main(ARGV))
"""


def test_a_full_disk_and_a_truncated_checkpoint_are_told_once_and_cost_no_more_than_one_checkpoint(
    jobs: Jobs, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    argv = ["--hidden", "16", "--checkpoint", str(checkpoints), "--resume"]
    status, output = train(jobs, *argv, "--epochs", "2").finish()
    assert status == 0, output
    older, newest = sorted(checkpoints.iterdir())

    status, output = jobs.run(RANKS, FULL_DISK, ARGV=[*argv, "--epochs", "3"]).finish()
    assert status == 1
    assert "Traceback" not in output, output
    assert output.count("error: ") == 1
    assert f"error: rank 0 of {RANKS}: cannot write {checkpoints}/.step-" in output, output
    assert "(File too large); make room there" in output
    assert sorted(checkpoints.iterdir()) == [older, newest]

    truncate(newest)
    status, output = train(jobs, *argv, "--epochs", "3").finish()
    assert status == 1
    assert output.count("error: ") == 1
    assert "Traceback" not in output
    message = f"error: rank 1 of {RANKS}: {newest}/rank-00001.safetensors is truncated or altered"
    assert message in output, output
    assert f"remove the folder {newest} to resume from {older.name}" in output


def test_the_comparison_trains_four_ways_and_shows_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apps.train.compare", "--ranks", "2", "--out", str(tmp_path / "runs")]
    done = subprocess.run(
        [*command, "--epochs", "1", "--hidden", "16"],
        check=False,
        capture_output=True,
        text=True,
        timeout=3 * JOB_S,
        cwd=PROJECT,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "compare.png").stat().st_size > 10_000
    table = done.stdout[done.stdout.index("test accuracy and what it cost") :]
    for method in ("dense", "Marsit, K = 100", "Marsit, K = none", "cascading SSDM"):
        assert method in table


def test_trains_without_mpirun(tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    command = [sys.executable, "-m", "apps.train", "--epochs", "1", "--json", str(record)]
    subprocess.run(command, check=True, capture_output=True, timeout=JOB_S, cwd=PROJECT, env=os.environ)
    last = json.loads(record.read_text().splitlines()[-1])
    assert (last["ranks"], last["bits_per_element"]) == (1, 0.0)
