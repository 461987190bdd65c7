"""Figure 2 of ScaleCom: the similarity of the ranks' memories, and the effects of learning rate and filter on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.networks import Task, train
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results
from apps.train.training import Training
from collectives import Communicator
from mpicomp import LocalTopK, ScaleCom
from mpicomp.algorithms import Algorithm
from mpicomp.diagnostics import gather_rows, mean_cosine_distance

EVERY = 5  # steps between two looks
STEPS_PER_EPOCH = 11  # 4 ranks, 1437 digits
MODEL = ("--dataset", "digits", "--model", "resnet8", "--width", "8", "--optimizer", "sgd", "--batch", "32")
SAME = "ResNet-8 of 19 thousand on handwritten digits, 32 images a rank, SGD without momentum"
BASE, SCALED = 0.01, 1.0


def similarity(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Compare the memories of the ranks in training runs."""
    many, epochs = (seeds, 36) if full else (min(seeds, 3), 6)
    runs = {
        f"learning rate {lr:g}, beta {beta:g}": (ScaleCom(rate=100, beta=beta), 4, lr)
        for lr in (BASE, SCALED)
        for beta in (1.0, 0.1)
    }
    workers = {f"{ranks} ranks": (LocalTopK(1000), ranks, BASE) for ranks in (2, 4, 8)}
    found = _distances(results, runs, many, epochs) | _distances(results, workers, many, epochs)
    last = {name: [float(np.mean(run["distance"][-3:])) for run in records] for name, records in found.items()}
    names = list(runs)
    filtered, slow = paired(last[names[3]], last[names[2]]), paired(last[names[1]], last[names[0]])
    grown = paired(last[names[2]], last[names[0]])
    means = {name: float(np.mean(values)) for name, values in last.items()}
    differs = f"{SAME}, 4 ranks, 100x, {epochs * STEPS_PER_EPOCH} steps, last 3 looks, {many} seeds; there ResNet-18"
    first = [record["distance"][0] for record in found["4 ranks"]]
    falls = paired(last["4 ranks"], first)
    spread = ", ".join(f"{means[name]:.2f} with {name}" for name in workers)
    return [
        Claim(
            "Fig. 2a",
            "memories become similar within 90 iterations, for any number of workers",
            "falls fast, then stays; the same for all",
            f"local top-k 1000x: 4 ranks from {np.mean(first):.2f} by {falls}; at the end {spread}",
            bool(falls.below and max(means[w] for w in workers) < 1.5 * min(means[w] for w in workers)),
            f"{SAME}, learning rate {BASE:g}; judged: falls, and ends differ by less than half",
        ),
        Claim(
            "Fig. 2c",
            "at 100 times the learning rate memories are less similar",
            "much larger distance",
            f"{means[names[2]]:.2f} at {SCALED:g}, {means[names[0]]:.2f} at {BASE:g}: {grown}",
            grown.above,
            differs,
        ),
        Claim(
            "Fig. 2c",
            "at 100 times the learning rate beta 0.1 makes them more similar than beta 1",
            "curve well below",
            f"{means[names[3]]:.2f} against {means[names[2]]:.2f}: {filtered}",
            filtered.below,
            differs,
        ),
        Claim(
            "Fig. 2c",
            "the same at the normal learning rate",
            "not shown",
            f"{means[names[1]]:.2f} against {means[names[0]]:.2f}: {slow}",
            None,
            differs,
        ),
    ], [
        plot(results, name, {key: found[key] for key in keys}, "distance", "mean cosine distance of memories")
        for name, keys in (("memories", runs), ("memories-ranks", workers))
    ]


def _distances(
    results: Results, runs: Mapping[str, tuple[Algorithm, int, float]], seeds: int, epochs: int
) -> dict[str, list[Record]]:
    def make(name: str, seed: int) -> Run:
        method, ranks, lr = runs[name]
        kept = f"memories-{type(method).__name__.lower()}-{ranks}-{lr:g}-{getattr(method, 'beta', 1.0):g}"
        task = Task((*MODEL, *length(epochs, ranks)), ranks)
        return partial(recorded, results, kept, distances, method, task, seed, lr)

    return run_seeds(runs, seeds, make)


def length(epochs: int, ranks: int) -> tuple[str, str]:
    """The option for nearly as many steps with any number of ranks."""
    return ("--epochs", str(max(1, epochs * ranks // 4)))


def recorded(
    results: Results, name: str, look: Callable[..., Record], method: Algorithm, task: Task, seed: int, lr: float
) -> Record:
    """Return the findings of a look at a run, from the folder if they are there; its name is `name` and the seed."""
    own = ("--lr", str(lr))
    settings = {"options": [*task.options, *own], "method": repr(method), "ranks": task.ranks, "seed": seed}
    return results.get(f"{name}-{seed}", settings, partial(look, method, task, seed, own))


def distances(method: Algorithm, task: Task, seed: int, own_options: Sequence[str] = ()) -> Record:
    """Train, and measure the mean cosine distance between the ranks' memories each `EVERY` steps."""
    steps: list[int] = []
    found: list[float] = []

    def watch(comm: Communicator, training: Training) -> None:
        if training.step % EVERY:
            return
        residual = training.optimizer.aggregators[0].residual
        assert residual is not None
        rows = gather_rows(comm, residual)
        if comm.rank == 0:
            steps.append(training.step)
            found.append(mean_cosine_distance(rows))

    record = train(task, method, seed, own_options, watch)
    return {"step": steps, "distance": found, "accuracy": record["accuracy"], "diverged": record["diverged"]}


def plot(results: Results, name: str, found: dict[str, list[Record]], key: str, label: str) -> Path:
    """Draw `key` of the records against their ``step``."""
    lines = [Curve(line, records[0]["step"], [record[key] for record in records]) for line, records in found.items()]
    return curves(results.folder / f"{name}.png", lines, "step", label)
