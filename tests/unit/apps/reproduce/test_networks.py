"""Networks that are trained for a study, by ranks that are threads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.reproduce.networks import Task, train, trained
from apps.studies.results import Results
from apps.train.training import Training
from collectives import Communicator
from mpicomp import Dense, Marsit, PerNode

DIGITS = Task(("--dataset", "digits", "--epochs", "2", "--lr", "0.05"), ranks=3, train_samples=960, test_samples=200)


def test_a_run_learns_and_is_the_same_each_time() -> None:
    found = train(DIGITS, Marsit(full_precision_every=20), seed=1)
    assert found == train(DIGITS, Marsit(full_precision_every=20), seed=1)
    assert found["accuracy"] == found["epochs"][-1]["accuracy"] > 0.6
    assert not found["diverged"]
    assert [record["epoch"] for record in found["epochs"]] == [1, 2]


def test_bytes_are_those_that_a_rank_sends() -> None:
    dense, marsit = (train(DIGITS, method, seed=0) for method in (Dense(), Marsit(full_precision_every=None)))
    assert dense["epochs"][0]["bits_per_element"] == pytest.approx(32, rel=0.02)
    # the agreement on each step takes 80 bytes more a message, which a model of 2,000 elements feels
    assert 1 < marsit["epochs"][0]["bits_per_element"] < 1.2
    assert dense["epochs"][1]["bytes_so_far_per_rank"] == 2 * dense["epochs"][0]["bytes_so_far_per_rank"]


def test_training_that_diverges_counts_as_a_guess() -> None:
    found = train(DIGITS, Dense(), seed=0, own_options=("--lr", "1e30"))
    assert found["diverged"]
    assert found["accuracy"] == 0.1


def test_a_watch_sees_every_step_on_every_rank() -> None:
    seen: list[tuple[int, int]] = []

    def watch(comm: Communicator, training: Training) -> None:
        seen.append((comm.rank, training.step))

    train(DIGITS, Dense(), seed=0, own_options=("--epochs", "1"), watch=watch)
    assert sorted(seen) == [(rank, step) for rank in range(3) for step in range(1, 21)]


def test_a_run_that_is_kept_is_not_made_again(tmp_path: Path) -> None:
    short = ("--epochs", "1")
    first = trained(Results(tmp_path), "dense", DIGITS, Dense(), 0, short)
    written = (tmp_path / "dense-0.json").stat().st_mtime_ns
    assert trained(Results(tmp_path), "dense", DIGITS, Dense(), 0, short) == first
    assert (tmp_path / "dense-0.json").stat().st_mtime_ns == written
    trained(Results(tmp_path), "dense", DIGITS, Dense(), 0, (*short, "--lr", "0.01"))
    assert (tmp_path / "dense-0.json").stat().st_mtime_ns > written


def test_nodes_have_as_many_ranks_as_the_task_names(tmp_path: Path) -> None:
    method, short = Marsit(full_precision_every=20), ("--epochs", "1")
    alone = replace(DIGITS, ranks_per_node=1)
    assert (
        train(alone, PerNode(method), 0, short)["epochs"][0]["loss"]
        == train(DIGITS, method, 0, short)["epochs"][0]["loss"]
    )
    for task in (DIGITS, alone):  # results that were kept before tasks had nodes stay valid
        trained(Results(tmp_path), "of-a-task", task, method, 0, short)
        settings = json.loads((tmp_path / "of-a-task-0.json").read_text())["settings"]
        assert ("ranks_per_node" in settings) == (task.ranks_per_node is not None)


def test_islands_average_gradients_within_a_node(tmp_path: Path) -> None:
    adam = ("--epochs", "1", "--optimizer", "adam")
    everyone = replace(DIGITS, ranks_per_node=DIGITS.ranks)
    dense, islands, apart = (
        train(task, method, 0, adam)["epochs"][0]["test_loss"]
        for task, method in (
            (everyone, Dense()), (replace(everyone, islands=True), Marsit(1)), (everyone, Marsit(1)),
        )
    )  # fmt: skip
    assert islands == pytest.approx(dense, rel=1e-4)  # one island of all ranks: the mean gradient in one optimizer
    assert abs(apart - dense) > 0.001 * dense
    for task in (everyone, replace(everyone, islands=True)):
        trained(Results(tmp_path), "of-a-task", task, Marsit(1), 0, adam)
        settings = json.loads((tmp_path / "of-a-task-0.json").read_text())["settings"]
        assert settings.get("islands", False) is task.islands
