"""Whole jobs under mpirun: their exit status, their one error line, and their end on request."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.unit.faults.jobs import JOB_S, Job, Jobs

RANKS = 2
ENDLESS = "20000"  # epochs: they take minutes, so that a job that is left behind ends some time

pytestmark = pytest.mark.timeout(4 * JOB_S)


def idx_folder(folder: Path, n_found: int) -> Path:
    """A dataset whose training images are announced as 64 and end after `n_found`."""
    folder.mkdir()
    for prefix in ("train", "t10k"):
        for name, shape in (("images-idx3", (64, 8, 8)), ("labels-idx1", (64,))):
            header = bytes((0, 0, 8, len(shape))) + np.array(shape, ">u4").tobytes()
            content = bytes(n_found * 64 if (prefix, name) == ("train", "images-idx3") else int(np.prod(shape)))
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + content)
    return folder


def small(folder: Path) -> list[str]:
    """Return arguments for a small model on a small dataset; the digits would load scikit-learn on every rank."""
    return [
        "--hidden",
        "16",
        "--batch",
        "16",
        "--dataset",
        "idx",
        "--data",
        str(idx_folder(folder / "data", n_found=64)),
    ]


# Arguments, the exit status, and the error.
ERRORS: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--epochs", "0"), 2, "argument --epochs: 0 is not at least 1"),
    (
        ("--topology", "torus:2x3"),
        1,
        "--topology torus:2x3: rank 0 of .: 2 ranks do not fill a torus of 2 x 3 .* fit: 1 x 2",
    ),
    (("--on-failure", "regroup"), 1, "--on-failure regroup: .*: start the job by `mpirun --with-ft ulfm`"),
    (("--dataset", "idx", "--data", "{folder}/no"), 1, "rank 0 of 2: there is no folder .*; correct --data DIR"),
    (("--dataset", "idx", "--data", "{folder}/cut"), 1, "rank 0 of 2: .*/train-images.* is damaged: fetch it"),
    (("--checkpoint", "{folder}/cut/t10k-labels-idx1-ubyte"), 1, "rank 0 of 2: cannot write .*--checkpoint folder"),
    (("--lr", "1e30"), 3, r"training diverged: rank 0 of 2: NaN or infinity .*from ranks 0, 1; lower the learning"),
)
ALL_ERRORS = """
from apps.train.__main__ import main
statuses = [main(argv) for argv in CASES]
tell(f"statuses-{mpicomp.Communicator().rank}", statuses)
sys.exit(statuses[-1])
"""


def test_an_error_of_all_ranks_is_printed_once(jobs: Jobs, tmp_path: Path) -> None:
    idx_folder(tmp_path / "cut", n_found=63)
    cases = [["--hidden", "16", *(text.format(folder=tmp_path) for text in argv)] for argv, _, _ in ERRORS]
    job = jobs.run(RANKS, ALL_ERRORS, CASES=cases)
    ended, output = job.finish()
    assert "Traceback" not in output
    statuses = [status for _, status, _ in ERRORS]
    assert [job.told(f"statuses-{rank}") for rank in range(RANKS)] == [str(statuses)] * RANKS, output
    assert ended == statuses[-1]
    errors = [line for line in output.splitlines() if "error: " in line]
    for error, (_, _, message) in zip(errors, ERRORS, strict=True):
        assert re.search(message, error), error


def kinds(record: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in record.read_text().splitlines()] if record.exists() else []


def test_a_run_that_signals_and_a_killed_rank_end_is_resumed(jobs: Jobs, tmp_path: Path) -> None:
    record, checkpoints = tmp_path / "run.json", tmp_path / "checkpoints"
    argv = ["-m", "apps.train", *small(tmp_path), "--checkpoint", str(checkpoints), "--json", str(record), "--resume"]

    def started(every: str) -> Job:
        """A run that has trained an epoch more than the earlier ones."""
        done = len(kinds(record))
        job = jobs.start(RANKS, [*argv, "--checkpoint-every", every, "--epochs", ENDLESS])
        job.wait_for(lambda: len(kinds(record)) > done, "trained an epoch")
        return job

    job = started(every=ENDLESS)
    job.process.send_signal(signal.SIGUSR1)
    ended, output = job.finish()
    assert ended == 0, output
    assert "stopped by a signal after step" in output
    assert "\x1b" not in output, "escape sequences have no place in a log file"
    (saved,) = checkpoints.iterdir()

    job = started(every=ENDLESS)
    job.wait_for(lambda: f"resumed from {saved}" in job.output, "printed that it goes on")  # mpirun passes it on later
    job.process.send_signal(signal.SIGTERM)  # of which mpirun makes SIGKILL soon: there may be no checkpoint of it
    ended, output = job.finish()
    assert ended == 1, output

    job = started(every="1steps")
    os.kill(job.ranks()[-1], signal.SIGKILL)
    ended, output = job.finish()
    assert ended != 0
    assert "signal 9" in output, output

    done = len(kinds(record))
    ended, output = jobs.start(RANKS, [*argv, "--epochs", str(done + 1)]).finish()
    assert ended == 0, output
    assert "resumed from" in output
    assert kinds(record) == ["epoch"] * (done + 1) + ["result"]


def test_a_stopped_rank_ends_the_run_and_is_named_once(jobs: Jobs, tmp_path: Path) -> None:
    record = tmp_path / "run.json"
    # On a busy machine the imports of one rank may take so much longer than those of the others.
    limits = ["--epochs", ENDLESS, "--timeout", "5", "--arrival-timeout", "20"]
    job = jobs.start(3, ["-m", "apps.train", *small(tmp_path), *limits, "--json", str(record)])
    job.wait_for(lambda: bool(kinds(record)) or job.process.poll() is not None, "trained an epoch")
    assert kinds(record), job.output
    stopped = job.ranks()[1]
    os.kill(stopped, signal.SIGSTOP)
    ended, output = job.finish()
    assert ended != 0
    (error,) = (line for line in output.splitlines() if "error: " in line)
    assert re.search(r"error: rank \d of 3[:,] .*(no answer from rank 1|nothing from rank)", error), error
    job.await_end(stopped)


# Trains; then, from the next checkpoint on, files of this process may grow no further: a disk that is full, but not yet
# for MPI; then it meets a checkpoint that is truncated on rank 1.
DAMAGE = """
import resource
from apps.train import checkpoint
from apps.train.__main__ import main
statuses = [main([*ARGV, "--epochs", "2"])]
save = checkpoint.save
def save_on_a_full_disk(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
    return save(*args)
checkpoint.save = save_on_a_full_disk
statuses.append(main([*ARGV, "--epochs", "3"]))
rank = mpicomp.Communicator().rank
if rank == 1:
    path = checkpoint.checkpoints(Path(ARGV[1]))[-1] / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 10)
statuses.append(main([*ARGV, "--epochs", "3"]))
tell(f"statuses-{rank}", statuses)
"""


def test_a_full_disk_and_a_truncated_checkpoint_are_reported_once_and_cost_one_checkpoint_at_most(
    jobs: Jobs, tmp_path: Path
) -> None:
    checkpoints = tmp_path / "checkpoints"
    job = jobs.run_warm(RANKS, DAMAGE, ARGV=["--checkpoint", str(checkpoints), "--resume", *small(tmp_path)])
    status, output = job.finish()
    assert status == 0, output
    assert [job.told(f"statuses-{rank}") for rank in range(RANKS)] == ["[0, 1, 1]"] * RANKS, output
    assert "Traceback" not in output, output
    older, newest = sorted(checkpoints.iterdir())
    full, truncated = (line for line in output.splitlines() if "error: " in line)
    assert f"error: rank 0 of {RANKS}: cannot write {checkpoints}/.step-" in full
    assert "(File too large); make room there" in full
    assert f"error: rank 1 of {RANKS}: {newest}/rank-00001.safetensors is truncated or altered" in truncated
    assert f"remove the folder {newest} to resume from {older.name}" in truncated
