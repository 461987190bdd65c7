"""Runs of split learning: they learn, with few bytes, and the same wherever the clients are."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.pipeline.split.__main__ import main
from apps.pipeline.split.options import Method, Options
from apps.pipeline.split.training import Training, train
from apps.train.data import load
from collectives import Communicator
from mpicomp.pipeline.messages import HEADER_BYTES
from tests.mpi.lanes import up_to_two_ranks

BATCH = 16
pytestmark = [pytest.mark.mpi(min_size=2, max_size=3), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def one_thread_and_hooks_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    torch.set_num_threads(1)


def short(method: Method = "aq-sgd", **changed: Any) -> Options:
    chosen: dict[str, Any] = {"method": method, "clients": 3, "concentration": 5.0, "rounds": 4, "batch": BATCH}
    return Options(**(chosen | {"examples": 300, "lr": 0.02, "dataset": "digits"} | changed))


def learned(record: dict[str, Any]) -> list[tuple[float, float]]:
    return [(each["loss"], each["test_accuracy"]) for each in record["rounds"]]


@up_to_two_ranks
def test_all_methods_learn_and_few_bits_send_few_bytes(comm: Communicator) -> None:
    digits = load("digits")
    fp32, direct, deltas = (train(short(method), comm, digits) for method in ("fp32", "directq", "aq-sgd"))
    for record in (fp32, deltas):
        assert record["rounds"][-1]["loss"] < 0.7 * record["rounds"][0]["loss"]
        assert record["rounds"][-1]["test_accuracy"] > 0.4
    sizes = fp32["client_examples"]
    examples, steps = 3 * sum(sizes), 3 * sum(-(-size // BATCH) for size in sizes)  # of 3 local epochs
    activations, features = 4 * (8 * 4 * 4), 4 * 64
    sent = examples * (activations + features) + 2 * HEADER_BYTES * steps
    assert [fp32["rounds"][1][part] for part in ("bytes_up", "bytes_down")] == [sent, sent]
    for part in ("bytes_up", "bytes_down"):
        assert direct["rounds"][0][part] == direct["rounds"][1][part] == deltas["rounds"][1][part]
        assert deltas["rounds"][1][part] < 0.3 * fp32["rounds"][1][part]
        assert deltas["rounds"][0][part] > deltas["rounds"][1][part]  # what is new travels in full


def test_runs_do_not_depend_on_the_rank_on_which_a_client_is(comm: Communicator) -> None:
    options, digits = short(rounds=2, flip=True), load("digits")
    record = train(options, comm, digits)
    fewer = comm.split(0 if comm.rank < 2 else None)
    if fewer is not None:
        with fewer:
            assert learned(train(options, fewer, digits)) == learned(record)


def test_mirrored_images_have_ids_of_their_own(comm: Communicator) -> None:
    training = Training(short(flip=True, local_epochs=8), comm, load("digits"))
    images = training._dataset.train.images
    for ids, found, labels in training._batches(0):
        for number, image, label in zip(ids, found, labels, strict=True):
            example = training.examples[0][number // 2]
            expected = images[example].flip(2) if number % 2 else images[example]
            assert torch.equal(image, expected)
            assert label == training._dataset.train.labels[example]
    seen = {int(number) for ids, *_ in training._batches(0) for number in ids}
    assert len(seen) > 1.5 * len(training.examples[0])
    training.party.close()


def test_the_program_writes_records_and_a_plot(comm: Communicator, tmp_path: Path) -> None:
    folder = Path(comm.broadcast_object(str(tmp_path)))
    options = ["--rounds=2", "--clients=2", "--examples=64", "--dataset=digits", "--methods", "fp32", "aq-sgd"]
    assert main([*options, f"--json={folder / 'split.json'}", f"--plot={folder / 'split.png'}"]) == 0
    record = json.loads((folder / "split.json").read_text())
    assert [run["name"] for run in record["runs"]] == ["fp32", "AQ-SGD fw2 bw8[0.2]"]
    assert all(len(run["rounds"]) == 2 and sum(run["client_examples"]) == 64 for run in record["runs"])
    assert np.isfinite([each["loss"] for run in record["runs"] for each in run["rounds"]]).all()
    assert (folder / "split.png").stat().st_size > 5000


def test_clients_that_are_too_many_are_told_on_all_ranks(
    comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--clients=40", "--examples=30", "--dataset=digits"]) == 1
    told = capsys.readouterr().err
    assert ("30 examples are not shared out so that each of 40 clients has 1" in told) == (comm.rank == 0)
