"""DoubleSqueeze against epochs: all methods from the same models on the same images, each at its own learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.doublesqueeze.methods import DENSE, FAMILIES, GROUPS, METHODS, RANKS, WHOLE, methods
from apps.reproduce.networks import Task, last, per_epoch, trained
from apps.studies.parallel import run_seeds
from apps.studies.results import Results, slug
from apps.studies.tuning import climb

LEARNING_RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
FIRST = 0.2
TUNING_SEED = 1000  # of the runs that choose a learning rate, and of no others
HIDDEN, BATCH, SAMPLES, TESTED = 64, 16, 4096, 2000
MOST_SEEDS = 5
MARGIN = 0.05
"""A method converges "as" another one if its loss is surely less than this part above that of the other."""
POINTS = 0.01
"""A method reaches the accuracy of another one if it is surely less than this below that of the other."""

Runs = dict[str, list[Record]]
"""The runs of each method, by seed."""


def task(full: bool) -> Task:
    """A classifier of garments with 50,890 elements, trained by plain SGD."""
    options = ("--dataset", "fashion-mnist", "--hidden", str(HIDDEN), "--batch", str(BATCH), "--optimizer", "sgd")
    return Task((*options, "--epochs", "20" if full else "6"), RANKS, "ring", SAMPLES, TESTED)


def steps_per_epoch() -> int:
    """Steps in which all ranks together see all images."""
    return SAMPLES // (RANKS * BATCH)


def learn(results: Results, seeds: int, full: bool) -> tuple[Runs, dict[str, float]]:
    """The runs of every method, and the learning rates at which they were made."""

    def run(name: str, rate: float, seed: int) -> partial[Record]:
        file = f"{slug(name)}-{rate:g}{'-full' if full else ''}"
        return partial(trained, results, file, task(full), methods(WHOLE)[name], seed, ("--lr", f"{rate:g}"))

    def score(record: Record) -> float:
        return -float("inf") if record["diverged"] else -float(record["epochs"][-1]["loss"])

    rates = climb(LEARNING_RATES, dict.fromkeys(METHODS, FIRST), partial(run, seed=TUNING_SEED), score)
    seeds = seeds if full else min(seeds, MOST_SEEDS)
    return run_seeds(METHODS, seeds, lambda name, seed: run(name, rates[name], seed)), rates


def judge(found: Runs, rates: dict[str, float], full: bool) -> list[Claim]:
    """Claims about methods that converge as others, and methods that are worse."""
    losses = {name: last(records, "loss") for name, records in found.items()}
    differs = (
        f"MLP with {HIDDEN} hidden units on {SAMPLES} images of Fashion-MNIST, {RANKS} ranks, "
        f"{20 if full else 6} epochs, {len(found[DENSE])} seeds, loss of the last epoch; k is a hundredth of each 6400 "
        "elements; "
    )

    def compare(what: str, paper: str, name: str, other: str, margin: float | None) -> Claim:
        """Claim that a loss is surely less than `margin` above another one or, without a margin, surely above it."""
        gap = paired(losses[name], losses[other])
        ours = f"{name} {np.mean(losses[name]):.3f}, {other} {np.mean(losses[other]):.3f}; difference {gap}"
        tuned = (
            f"learning rates {rates[name]:g} and {rates[other]:g}, the best of {LEARNING_RATES[0]:g}, doubled up to "
            f"{LEARNING_RATES[-1]:g}, on another seed"
        )
        holds = gap.above if margin is None else gap.most < margin * float(np.mean(losses[other]))
        judged = "" if margin is None else f"; “as”: surely less than {margin:.0%} above"
        return Claim(where, what, paper, ours, holds, differs + tuned + judged)

    claims = []
    for group, (ours, memory, bare) in FAMILIES.items():
        where = f"experiments, {group}"
        for other in (memory, DENSE):
            what = f"{ours} converges as {other} per epoch"
            claims.append(compare(what, "curves fall together", ours, other, MARGIN))
        for better in (ours, memory, DENSE):
            what = f"{bare}, without error feedback, converges worse than {better}"
            claims.append(compare(what, "curve above", bare, better, None))
        right, dense = (last(found[name], "accuracy") for name in (ours, DENSE))
        gap = paired(dense, right)
        claims.append(
            Claim(
                where,
                f"{ours} reaches the test accuracy of dense SGD",
                "not in the notes",
                f"{np.mean(right):.2%} and {np.mean(dense):.2%}; dense − ours {gap}",
                gap.most < POINTS,
                f"{differs}“reaches”: surely less than {POINTS:.0%} below; {TESTED} images tested, and at a constant "
                "learning rate the last epoch's accuracy scatters by some points from seed to seed",
            )
        )
    return claims


def draw(found: Runs, folder: Path) -> list[Path]:
    """Draw training loss and test accuracy against epochs, a figure of each for each group."""
    return [
        curves(folder / f"{slug(group)}-{key}-epochs.png", _curves(found, names, key), "epoch", label)
        for group, names in GROUPS.items()
        for key, label in (("loss", "training loss"), ("accuracy", "test accuracy"))
    ]


def _curves(found: Runs, names: Sequence[str], key: str) -> list[Curve]:
    return [Curve(name, per_epoch(found[name], "epoch")[0], per_epoch(found[name], key)) for name in names]
