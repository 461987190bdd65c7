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
import torch

from apps.train.__main__ import train
from apps.train.data import load
from apps.train.models import build
from apps.train.options import DEFAULT_LR, parse

pytestmark = pytest.mark.timeout(2 * JOB_S)
RANKS, BATCH, IMAGES = 3, 8, 200

# Ranks of DEATHS die when they call a function for the n-th time, besides those of FAULTS, which die within a step.
TRAINING = """
import functools, json, zlib
from collections import Counter
from mpi4py import MPI
from apps.faults import Injector, parse_schedule
from apps.train import __main__ as program, checkpoint
from apps.train.dealer import Dealer
from apps.train.training import Training
from collectives.recovery import newcomers
me = MPI.COMM_WORLD.rank
faults = Injector(parse_schedule(FAULTS), me)
draws, calls, rows = 0, Counter(), (FOLDER / f"rows-{me}").open("w", buffering=1)

def die_in(owner, name):
    function = getattr(owner, name)
    def call(*arguments):
        calls[name] += 1
        if DEATHS.get(me) == (name, calls[name]):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    setattr(owner, name, call)

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
    np.save(FOLDER / f"model-{me}.npy", np.frombuffer(model, np.float32))

Dealer.draw, Training._after_synchronization = draw, count
die_in(checkpoint, "flush_folder")
die_in(checkpoint, "_write")
die_in(Training, "_evaluate_part")
die_in(Dealer, "draw")
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


def resume(ranks: int, saved: Path, argv: list[str], ranks_per_node: int | None = None) -> dict[str, Any]:
    """Train on from the newest checkpoint, on threads; return the last line of the record."""
    options = parse([*argv, "--json", str(saved / "run.json"), "--resume"])
    mpicomp.run_local(ranks, lambda comm: train(options, comm), ranks_per_node=ranks_per_node)
    found: dict[str, Any] = records(saved / "run.json")[-1]
    return found


@pytest.mark.parametrize("spares", [0, 1])  # 1: rank 2 takes the place of rank 1
def test_those_that_are_left_train_on_with_each_image_once_and_their_checkpoint_is_resumed(
    jobs: Jobs, tmp_path: Path, spares: int
) -> None:
    saved, data = tmp_path / "saved", write_images(tmp_path / "data")
    argv = [
        *("--dataset", "idx", "--data", str(data), "--hidden", "8", "--batch", str(BATCH), "--epochs", "3"),
        *("--checkpoint", str(saved), "--method", "marsit", "--full-precision-every", "5"),
        *("--optimizer", "sgd", "--decay", "step", "--decay-epochs", "2"),
    ]
    record = tmp_path / "run.json"
    own = ["--on-failure", "regroup", "--spares", str(spares), "--timeout", "60", "--json", str(record)]
    # rank 0 dies before it renames the checkpoint of the second epoch: it flushes two folders of each checkpoint
    deaths = {0: ("flush_folder", 3)}
    job = jobs.run_warm(RANKS, TRAINING, ARGV=[*argv, *own], FAULTS="kill:1:4:middle", DEATHS=deaths)
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


def test_survivors_that_keep_the_batch_make_the_steps_of_one_rank_with_all_images(jobs: Jobs, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data")
    argv = [
        *("--dataset", "idx", "--data", str(data), "--hidden", "8", "--batch", str(BATCH), "--epochs", "2"),
        *("--method", "dense", "--optimizer", "sgd", "--on-failure", "regroup", "--keep-batch"),
    ]
    job = jobs.run_warm(RANKS, TRAINING, ARGV=argv, FAULTS="kill:1:4:middle", DEATHS={})
    status, output = job.finish()
    assert status == 0, output

    drawn = [
        [images for kind, _, images in records(tmp_path / f"rows-{rank}") if kind == "drawn"] for rank in range(RANKS)
    ]
    assert len(drawn[1]) == 5  # it died in its fifth step
    train = load("idx", data).train
    torch.manual_seed(0)
    model = build("mlp", train.images.shape[1:], 4, (8,), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=DEFAULT_LR["sgd"])
    for step, parts in enumerate(zip(drawn[0], drawn[2], strict=True)):
        images = [i for part in (*parts, *drawn[1][step : step + 1] * (step < 4)) for i in part]
        assert len(set(images)) == (RANKS * BATCH if step != 4 else 2 * BATCH)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train.images[images]), train.labels[images]).backward()
        optimizer.step()
    assert step == 2 * (IMAGES // (RANKS * BATCH)) - 1
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    for rank in (0, 2):
        np.testing.assert_allclose(job.load(f"model-{rank}"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "faults", "deaths", "ranks"),
    [
        pytest.param(["--per-node", "--ranks-per-node", "2"], "kill:1:3:middle", {}, [4, 4, 2], id="per node"),
        # one in a local step, and one while the moves of three are averaged
        pytest.param(["--local-steps", "3"], "kill:3:8:middle", {1: ("draw", 5)}, [4, 3, 1], id="local steps"),
    ],
)
def test_deaths_in_steps_checkpoints_and_evaluations_leave_equal_models_and_a_whole_record(
    jobs: Jobs, tmp_path: Path, options: list[str], faults: str, deaths: dict[int, tuple[str, int]], ranks: list[int]
) -> None:
    saved, data = tmp_path / "saved", write_images(tmp_path / "data")
    argv = [
        *("--dataset", "idx", "--data", str(data), "--hidden", "8", "--batch", str(BATCH), "--epochs", "3"),
        *("--checkpoint", str(saved), *options),
    ]
    record = tmp_path / "run.json"
    own = ["--on-failure", "regroup", "--timeout", "60", "--json", str(record)]
    # rank 0 between the state and the model of its second checkpoint, and rank 2 in the last evaluation
    deaths = {0: ("_write", 5), 2: ("_evaluate_part", 3), **deaths}
    job = jobs.run_warm(5, TRAINING, ARGV=[*argv, *own], FAULTS=faults, DEATHS=deaths)
    status, output = job.finish()
    assert status == 0, output
    assert job.told("status-4") == "0"

    models: dict[int, set[int]] = {}
    for rank in range(5):
        for kind, step, model in records(tmp_path / f"rows-{rank}"):
            if kind == "model":
                models.setdefault(step, set()).add(model)
    assert {len(of_step) for of_step in models.values()} == {1}
    *epochs, result = records(record)
    assert [(line["kind"], line["epoch"]) for line in epochs] == [("epoch", 1), ("epoch", 2), ("epoch", 3)]
    assert [line["ranks"] for line in epochs] == ranks, output
    assert (result["kind"], result["ranks"]) == ("result", ranks[-1])
    # the part of the dead rank was evaluated by others
    assert (epochs[-1]["accuracy"], epochs[-1]["test_loss"]) == (result["accuracy"], pytest.approx(result["test_loss"]))

    shutil.rmtree(max(saved.iterdir()))
    again = resume(ranks[-1] + 1, saved, argv, ranks_per_node=2 if "--per-node" in options else None)
    assert again["parameters_sha256"] == result["parameters_sha256"]
