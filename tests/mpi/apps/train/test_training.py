"""Runs of the training program: results, records, resumed runs and refused arguments."""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from apps.train import checkpoint
from apps.train.__main__ import train
from apps.train.agreement import JobError
from apps.train.options import parse
from apps.train.saver import Saver
from collectives import Communicator
from collectives.communicator import stopping
from collectives.communicator.stopping import StopSignals
from collectives.errors import CollectiveError
from tests.mpi.lanes import two_ranks, up_to_two_ranks

# Few steps and large batches: these tests do not look at accuracy.
SHORT = ("--batch", "64", "--hidden", "16", "--epochs", "4")
RESNET = ("--model", "resnet20", "--width", "4", "--batch", "64", "--epochs", "2")


def run(comm: Communicator, json_path: Path, *argv: str) -> list[dict[str, Any]]:
    """Train, and return the JSON lines on every rank."""
    stopping.STOP = StopSignals()  # each run stands for a process of its own
    train(parse([*argv, "--json", str(json_path)]), comm)
    comm.barrier()
    return [json.loads(line) for line in json_path.read_text().splitlines()]


@two_ranks
@pytest.mark.parametrize(
    "method",
    [
        ("dense", "--lr", "0.05"),
        ("marsit", "--full-precision-every", "100", "--lr", "0.05"),
        ("one-bit-adam", "--option", "warmup_steps=20", "--lr", "0.01"),
    ],
)
def test_learns_the_digits(folder: Path, comm: Communicator, method: tuple[str, ...]) -> None:
    *epochs, result = run(comm, folder / "run.json", "--algorithm", *method, "--epochs", "6")
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4, 5, 6]
    assert epochs[-1]["loss"] < epochs[0]["loss"] / 3
    assert result["accuracy"] > 0.9


def test_lines_carry_what_a_comparison_needs(folder: Path, comm: Communicator) -> None:
    *epochs, result = run(comm, folder / "run.json", *SHORT, "--method", "marsit", "--full-precision-every", "none")
    for record in (*epochs, result):
        assert record["algorithm"] == "marsit"
        assert record["algorithm_options"] == {"full_precision_every": None}
        assert (record["topology"], record["ranks"], record["synchronize"]) == ("ring", comm.size, "updates")
        assert record["count"] == 64 * 16 + 16 + 16 * 10 + 10
    bytes_so_far = [record["bytes_so_far_per_rank"] for record in epochs]
    assert bytes_so_far == sorted(bytes_so_far)
    steps = 4 * (1437 // (64 * comm.size))
    assert result["steps"] == result["rounds_so_far"] == steps
    assert result["bytes_sent_per_rank"] * steps == pytest.approx(result["bytes_so_far_per_rank"])
    assert 0 < result["seconds"] <= result["p99_seconds"]
    assert result["seconds_communicating_so_far"] <= result["seconds_so_far"]
    assert {"messages_per_rank", "bits_per_element", "baseline", "baseline_seconds", "speedup"} <= result.keys()


@two_ranks
def test_bits_per_element_are_those_of_the_wire(folder: Path, comm: Communicator) -> None:
    wide = ("--batch", "64", "--hidden", "2048", "--epochs", "1")
    one_bit = run(comm, folder / "a.json", *wide, "--method", "marsit", "--full-precision-every", "none")[-1]
    dense = run(comm, folder / "b.json", *wide, "--algorithm", "dense")[-1]
    assert 1.0 <= one_bit["bits_per_element"] < 1.15
    assert 32.0 <= dense["bits_per_element"] < 32.5


@two_ranks
@pytest.mark.parametrize(
    "argv",
    [
        (*SHORT, "--method", "marsit", "--full-precision-every", "3", "--optimizer", "adam"),
        (*SHORT, "--method", "marsit", "--residual", "paper", "--local-steps", "2", "--decay", "cosine"),
        (*SHORT, "--algorithm", "dense", "--warmup-epochs", "1"),
        (*SHORT, "--algorithm", "one-bit-adam", "--option", "warmup_steps=5", "--option", "bits=4"),
    ],
)
def test_two_epochs_and_two_more_are_four_to_the_bit(folder: Path, comm: Communicator, argv: tuple[str, ...]) -> None:
    argv = (*argv, "--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "2")
    whole = run(comm, folder / "run.json", *argv)
    if comm.rank == 0:
        # As if the run had been killed right after its second epoch.
        (folder / "checkpoints" / f"step-{whole[-1]['steps']:08d}").rename(folder / "gone")
    comm.barrier()
    resumed = run(comm, folder / "run.json", *argv, "--resume")
    assert resumed[-1]["parameters_sha256"] == whole[-1]["parameters_sha256"]
    assert [record["epoch"] for record in resumed[:-1]] == [1, 2, 3, 4]
    exact = ("loss", "accuracy", "test_loss", "bytes_so_far_per_rank", "best_accuracy")
    for ours, theirs in zip(resumed, whole, strict=True):
        assert [ours.get(key) for key in exact] == [theirs.get(key) for key in exact]


@two_ranks
@pytest.mark.parametrize(
    ("argv", "number"),
    [
        (RESNET, signal.SIGTERM),
        ((*SHORT, "--local-steps", "3"), signal.SIGUSR1),
        ((*SHORT, "--model", "alexnet", "--width", "4"), signal.SIGTERM),
    ],
)
def test_a_signal_on_one_rank_saves_all_and_the_resumed_run_has_the_same_bits(
    folder: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], number: signal.Signals
) -> None:
    whole = run(comm, folder / "whole.json", *argv)
    checkpoints = ("--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "100")
    calls = 0

    def signalled_after_step(self: Saver) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2 and comm.rank == comm.size - 1:
            signal.raise_signal(number)
        return after_step(self)

    after_step = Saver.after_step
    with monkeypatch.context() as patch:
        patch.setattr(Saver, "after_step", signalled_after_step)
        stopped = run(comm, folder / "run.json", *argv, *checkpoints)
    assert calls == 2
    assert [record["kind"] for record in stopped] == ["epoch"] * len(stopped)
    assert len(list((folder / "checkpoints").iterdir())) == 1
    resumed = run(comm, folder / "run.json", *argv, *checkpoints, "--resume")
    assert resumed[-1]["parameters_sha256"] == whole[-1]["parameters_sha256"]
    assert resumed[-1]["accuracy"] == whole[-1]["accuracy"]
    assert [record["loss"] for record in resumed[:-1]] == [record["loss"] for record in whole[:-1]]


@two_ranks
def test_steps_can_time_checkpoints(folder: Path, comm: Communicator) -> None:
    argv = ("--batch", "16", "--hidden", "16", "--epochs", "1", "--checkpoint-every", "2steps")
    steps = run(comm, folder / "run.json", *argv, "--checkpoint", str(folder / "checkpoints"))[-1]["steps"]
    last = steps - steps % 2
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"step-{last - 2:08d}", f"step-{last:08d}"]


@up_to_two_ranks
def test_resume_without_a_checkpoint_starts_at_the_beginning(folder: Path, comm: Communicator) -> None:
    records = run(comm, folder / "run.json", *SHORT, "--checkpoint", str(folder / "checkpoints"), "--resume")
    assert records[-1]["epochs"] == 4


@up_to_two_ranks
@pytest.mark.parametrize("damage", ["no state", "another model", "no meter"])
def test_a_state_of_another_program_is_one_error_of_all_ranks(
    folder: Path, comm: Communicator, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    argv = (*SHORT, "--checkpoint", str(folder / "checkpoints"))
    run(comm, folder / "run.json", *argv)
    load = checkpoint.load

    def damaged(*arguments: Any) -> checkpoint.Checkpoint | None:
        found = load(*arguments)
        if found is None or comm.rank != comm.size - 1:
            return found
        state = [] if damage == "no state" else {**found.state, "meter": {}} if damage == "no meter" else found.state
        return dataclasses.replace(found, state=state, model={} if damage == "another model" else found.model)

    monkeypatch.setattr(checkpoint, "load", damaged)
    with pytest.raises(JobError, match=rf"^rank {comm.size - 1} of {comm.size}: .* holds no state of this run \(.*\)"):
        run(comm, folder / "run.json", *argv, "--resume")


@up_to_two_ranks
def test_resume_with_other_options_is_refused_by_name(folder: Path, comm: Communicator) -> None:
    checkpoints = ("--checkpoint", str(folder / "checkpoints"))
    run(comm, folder / "run.json", *SHORT, *checkpoints)
    with pytest.raises(JobError, match=r"other options: lr was 0\.03 and is 0\.5, seed was 0 and is 1; use the same"):
        run(comm, folder / "run.json", *SHORT, *checkpoints, "--resume", "--lr", "0.5", "--seed", "1")
    with pytest.raises(JobError, match="holds checkpoints of an earlier run; add --resume or name another folder"):
        run(comm, folder / "run.json", *SHORT, *checkpoints)


@up_to_two_ranks
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--algorithm", "nonesuch"), "no algorithm 'nonesuch'"),
        (("--algorithm", "dense", "--full-precision-every", "3"), "--method dense takes no such option"),
        (("--algorithm", "one-bit-adam", "--option", "clip=1"), "--method one-bit-adam takes no such option"),
        (("--algorithm", "one-bit-adam", "--option", "bits=9"), "bits is 9"),
        (("--method", "marsit", "--option", "clip=-1"), "clip must be positive"),
        (("--algorithm", "dense", "--local-steps", "2"), 'local_steps=2 needs synchronize="updates"'),
        (("--batch", "5000"), "1437 training images do not fill one batch of 5000"),
        (("--width", "3"), "use --hidden"),
        (("--dataset", "idx", "--data", "/nowhere"), "there is no folder /nowhere; correct --data DIR"),
    ],
)
def test_what_cannot_run_is_refused_on_every_rank(
    folder: Path, comm: Communicator, argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        run(comm, folder / "run.json", *argv)


def test_data_that_one_rank_lacks_is_told_on_every_rank(folder: Path, comm: Communicator) -> None:
    last = comm.size - 1
    data = ("--dataset", "idx", "--data", "/nowhere") if comm.rank == last else ()
    with pytest.raises(JobError, match=f"^rank {last} of {comm.size}: there is no folder /nowhere"):
        run(comm, folder / "run.json", *data)


def test_divergence_names_the_ranks_and_is_recorded(folder: Path, comm: Communicator) -> None:
    path = folder / "run.json"
    with pytest.raises(CollectiveError, match="NaN or infinity"):
        run(comm, path, *SHORT, "--lr", "1e30", "--optimizer", "sgd", "--algorithm", "dense")
    comm.mpi_comm.Barrier()
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["diverged"]
