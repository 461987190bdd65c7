"""Ranks of `apps.train` that die: the others train on, evaluate, save, record, and their checkpoint can be resumed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpicomp
from tests.unit.faults.jobs import JOB_S, Jobs

pytest.importorskip("torch")
from apps.train.__main__ import train
from apps.train.options import parse

pytestmark = pytest.mark.timeout(2 * JOB_S)
RANKS, BATCH, IMAGES = 3, 8, 200

# Rank 1 dies within a step, and rank 0 before it renames the checkpoint of the second epoch.
TRAINING = """
import functools, json, zlib
from mpi4py import MPI
from apps.faults import Injector, parse_schedule
from apps.train import __main__ as program, checkpoint
from apps.train.dealer import Dealer
from apps.train.training import Training
from collectives.recovery import newcomers
me = MPI.COMM_WORLD.rank
faults = Injector(parse_schedule("kill:1:4:middle"), me)
draws, saves, rows = 0, 0, (FOLDER / f"rows-{me}").open("w", buffering=1)

def draw(dealer, draw=Dealer.draw):
    global draws
    faults.begin(draws)
    draws += 1
    epoch, images = dealer.epoch, draw(dealer)
    if images is not None:
        rows.write(json.dumps(["drawn", epoch, images.tolist()]) + "\\n")
    return images

def count(training, computed=0.0, count=Training._after_synchronization):
    count(training, computed)
    model = b"".join(one.detach().numpy().tobytes() for one in training.model.parameters())
    rows.write(json.dumps(["model", training.step, zlib.crc32(model)]) + "\\n")

def flush_folder(path, flush_folder=checkpoint.flush_folder):
    global saves
    saves += 1
    if me == 0 and saves == 3:  # two of each checkpoint
        os.kill(os.getpid(), signal.SIGKILL)
    flush_folder(path)

Dealer.draw, Training._after_synchronization, checkpoint.flush_folder = draw, count, flush_folder
program.Communicator = functools.partial(program.Communicator, faults.watch(MPI.COMM_WORLD))

def all_ready(spares, are_ready=newcomers.Newcomers._are_ready):
    while spares.waiting and not are_ready(spares):  # they load their modules
        time.sleep(0.01)
    return spares.waiting > 0

newcomers.Newcomers._are_ready = all_ready
with faults.installed():
    status = program.main(ARGV)
tell(f"status-{me}", status)
sys.exit(status)
"""


def write_images(folder: Path) -> Path:
    """Write a small dataset whose labels can be learned."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for prefix, n in (("train", IMAGES), ("t10k", 50)):
        labels = random.integers(0, 4, n, dtype=np.uint8)
        images = random.integers(0, 100, (n, 8, 8), dtype=np.uint8) + (40 * labels[:, np.newaxis, np.newaxis])
        for name, array in (("images-idx3", images.astype(np.uint8)), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
            (folder / f"{prefix}-{name}-ubyte").write_bytes(header + array.tobytes())
    return folder


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def resume(ranks: int, saved: Path, argv: list[str]) -> dict[str, Any]:
    """Train on from the newest checkpoint, on threads; return the last line of the record."""
    options = parse([*argv, "--json", str(saved / "run.json"), "--resume"])
    mpicomp.run_local(ranks, lambda comm: train(options, comm))
    found: dict[str, Any] = records(saved / "run.json")[-1]
    return found


@pytest.mark.parametrize("spares", [0, 1])  # 1: rank 2 takes the place of rank 1
def test_those_that_are_left_train_on_with_each_image_once_and_their_checkpoint_is_resumed(
    jobs: Jobs, tmp_path: Path, spares: int
) -> None:
    saved, data = tmp_path / "saved", write_images(tmp_path / "data")
    argv = [
        *("--dataset", "idx", "--data", str(data), "--hidden", "8", "--batch", str(BATCH), "--epochs", "3"),
        *("--checkpoint", str(saved), "--full-precision-every", "5"),
        *("--optimizer", "sgd", "--decay", "step", "--decay-epochs", "2"),
    ]
    record = tmp_path / "run.json"
    own = ["--on-failure", "regroup", "--spares", str(spares), "--timeout", "60", "--json", str(record)]
    job = jobs.run_warm(RANKS, TRAINING, ARGV=[*argv, *own])
    status, output = job.finish()
    assert status == 0, output
    assert job.told("status-2") == "0"

    lines = [records(tmp_path / f"rows-{rank}") for rank in range(RANKS)]
    joined_at = min(step for kind, step, _ in lines[2] if kind == "model")
    assert (joined_at > 4) == bool(spares)
    models: dict[int, set[int]] = {}
    for kind, step, model in (line for of_rank in lines for line in of_rank):
        if kind == "model":
            models.setdefault(step, set()).add(model)
    assert {len(of_step) for of_step in models.values()} == {1}
    lost = [images for kind, _, images in lines[1] if kind == "drawn"][-1]
    for epoch, ranks in enumerate((2, 2, 1)):
        drawn = Counter(
            i for of_rank in lines for kind, at, images in of_rank if (kind, at) == ("drawn", epoch) for i in images
        )
        assert set(drawn.values()) == {1}
        assert IMAGES - len(drawn) < ranks * BATCH  # the end of the epoch
        survivors = {
            i for rank in (0, 2) for kind, at, images in lines[rank] if (kind, at) == ("drawn", epoch) for i in images
        }
        assert epoch or not survivors & set(lost)  # drawn by the dead rank alone

    *epochs, result = records(record)
    assert [(line["kind"], line["epoch"], line["ranks"]) for line in epochs] == [
        ("epoch", 1, 2), ("epoch", 2, 2), ("epoch", 3, 1),
    ]  # fmt: skip
    assert (result["kind"], result["ranks"], result["steps"]) == ("result", 1, max(models))
    assert "epoch   3/3" in output

    older, newest = sorted(saved.iterdir())
    assert [json.loads((one / "manifest.json").read_text())["ranks"] for one in (older, newest)] == [1, 1]
    shutil.rmtree(newest)
    assert resume(1, saved, argv)["parameters_sha256"] == result["parameters_sha256"]
    assert resume(2, saved, [*argv, "--epochs", "4"])["epochs"] == 4
