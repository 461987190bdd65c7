"""A run that is resumed on another number of ranks learns on from where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.train.agreement import JobError
from collectives import Communicator
from tests.mpi.apps.train.ranks import first_ranks
from tests.mpi.apps.train.test_training import SHORT, run

# From 3 ranks to 2 and back: chunks of both are of unequal lengths.
pytestmark = pytest.mark.mpi(min_size=3, max_size=3)


@pytest.mark.parametrize(
    "argv",
    [
        ("--method", "marsit", "--optimizer", "adam", "--full-precision-every", "3"),
        ("--local-steps", "3"),
        ("--algorithm", "double-squeeze"),
        ("--algorithm", "one-bit-adam"),
        ("--model", "alexnet", "--width", "4"),
        ("--model", "resnet8", "--width", "4", "--hidden", "16"),
    ],
)
def test_a_run_goes_on_with_fewer_ranks_and_with_more(folder: Path, comm: Communicator, argv: tuple[str, ...]) -> None:
    argv = (*SHORT, *argv) if "--model" not in argv else ("--batch", "64", *argv[:4])
    argv = (*argv, "--checkpoint", str(folder / "checkpoints"))
    whole = run(comm, folder / "run.json", *argv, "--epochs", "2")
    with first_ranks(comm, comm.size - 1) as part:
        if part is not None:
            run(part, folder / "run.json", *argv, "--epochs", "3", "--resume")
    *epochs, result = run(comm, folder / "run.json", *argv, "--epochs", "4", "--resume")
    assert [(record["epoch"], record["ranks"]) for record in epochs] == [
        (1, comm.size), (2, comm.size), (3, comm.size - 1), (4, comm.size),
    ]  # fmt: skip
    assert epochs[:2] == whole[:2]
    assert epochs[3]["loss"] < epochs[1]["loss"]
    assert epochs[2]["loss"] < epochs[1]["loss"] * 1.1
    assert result["steps"] == 3 * (1437 // (64 * comm.size)) + 1437 // (64 * (comm.size - 1))
    sent = [record["bytes_so_far_per_rank"] for record in epochs]
    assert sent == sorted(sent)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names[-1] == f"step-{result['steps']:08d}"


def test_batch_and_rate_may_change_with_the_ranks_and_nothing_else(folder: Path, comm: Communicator) -> None:
    argv = (*SHORT, "--checkpoint", str(folder / "checkpoints"))
    run(comm, folder / "run.json", *argv)
    other = ("--batch", "32", "--lr", "0.01", "--topology", "star")
    with pytest.raises(JobError, match=r"batch was 64 and is 32, lr was 0\.03 and is 0\.01, topology was 'auto' and"):
        run(comm, folder / "run.json", *argv, "--resume", *other)
    with first_ranks(comm, comm.size - 1) as part:
        if part is not None:
            with pytest.raises(JobError, match="other options: seed was 0 and is 1; use the same"):
                run(part, folder / "run.json", *argv, "--resume", *other, "--seed", "1")
            records = run(part, folder / "run.json", *argv, "--resume", *other, "--epochs", "5")
            assert [record["batch"] for record in records[:-1]] == [64, 64, 64, 64, 32]
