"""DoubleSqueeze against epochs: all methods from the same models on the same images, each at its own learning rate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, Difference, paired
from apps.reproduce.doublesqueeze.methods import (
    DENSE,
    DS_1BIT,
    DS_TOPK,
    GROUPS,
    MEM_1BIT,
    MEM_TOPK,
    METHODS,
    QUANTIZED,
    RANKS,
    SPARSE,
    WHOLE,
    methods,
)
from apps.reproduce.networks import Task, trained
from apps.reproduce.parallel import side_by_side
from apps.reproduce.results import Book
from apps.reproduce.tuning import climb

GRID = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
FIRST = 0.2
TUNING_SEED = 1000  # of which no curve is drawn
HIDDEN, BATCH, SAMPLES, TESTED = 64, 16, 4096, 2000
MOST_SEEDS = 5
MARGIN = 0.05
"""By which part of the other's loss a method may be above it and still converge "as" it, at most."""
POINTS = 0.01
"""Of accuracy, likewise."""

Runs = dict[str, list[Record]]


def task(full: bool) -> Task:
    """A classifier of garments, 50,890 elements, trained by plain SGD."""
    options = ("--dataset", "fashion-mnist", "--hidden", str(HIDDEN), "--batch", str(BATCH), "--optimizer", "sgd")
    return Task((*options, "--epochs", "20" if full else "6"), RANKS, "ring", SAMPLES, TESTED)


def steps_per_epoch() -> int:
    """All ranks' images together are an epoch."""
    return SAMPLES // (RANKS * BATCH)


def learn(book: Book, seeds: int, full: bool) -> tuple[Runs, dict[str, float]]:
    """Every method's runs, one for each seed, and the learning rates they were made with."""

    def gain(plan: list[tuple[str, float]]) -> list[float]:
        runs = side_by_side([_run(book, name, TUNING_SEED, rate, full) for name, rate in plan])
        return [-float("inf") if run["diverged"] else -float(run["epochs"][-1]["loss"]) for run in runs]

    rates = climb(GRID, dict.fromkeys(METHODS, FIRST), gain)
    plan = [(seed, name) for seed in range(seeds if full else min(seeds, MOST_SEEDS)) for name in METHODS]
    found: Runs = {name: [] for name in METHODS}
    runs = side_by_side([_run(book, name, seed, rates[name], full) for seed, name in plan])
    for (_, name), run in zip(plan, runs, strict=True):
        found[name].append(run)
    return found, rates


def _run(book: Book, name: str, seed: int, rate: float, full: bool) -> partial[Record]:
    file = f"{slug(name)}-{rate:g}{'-full' if full else ''}"
    return partial(trained, book, file, task(full), methods(WHOLE)[name], seed, ("--lr", f"{rate:g}"))


def slug(name: str) -> str:
    """For files."""
    return name.lower().replace(",", "").replace(" ", "-")


def final(records: list[Record], key: str) -> list[float]:
    """A figure of each seed's last epoch."""
    return [float(record["epochs"][-1][key]) for record in records]


def claims_of(found: Runs, rates: dict[str, float], full: bool) -> list[Claim]:
    """Who converges as whom, and who is worse."""
    seeds = len(found[DENSE])
    losses = {name: final(records, "loss") for name, records in found.items()}
    differs = (
        f"MLP with {HIDDEN} hidden units on {SAMPLES} images of Fashion-MNIST, {RANKS} ranks, "
        f"{20 if full else 6} epochs, {seeds} seeds, loss of the last epoch; k is a hundredth of each 6400 elements; "
    )
    made = []
    for group, ours, memory, bare in (("1-bit", DS_1BIT, MEM_1BIT, QUANTIZED), ("top-k", DS_TOPK, MEM_TOPK, SPARSE)):
        where = f"experiments, {group}"
        for other in (memory, DENSE):
            gap = paired(losses[ours], losses[other])
            made.append(
                Claim(
                    where,
                    f"{ours} converges as {other} an epoch",
                    "curves fall together",
                    f"{_both(losses, ours, other)}; difference {gap}",
                    as_good(gap, MARGIN * float(np.mean(losses[other]))),
                    f"{differs}{_rates(rates, ours, other)}; “as”: surely less than {MARGIN:.0%} above",
                )
            )
        for better in (ours, memory, DENSE):
            gap = paired(losses[bare], losses[better])
            made.append(
                Claim(
                    where,
                    f"{bare}, without error feedback, converges worse than {better}",
                    "curve above",
                    f"{_both(losses, bare, better)}; difference {gap}",
                    gap.above,
                    f"{differs}{_rates(rates, bare, better)}",
                )
            )
        right = {name: final(found[name], "accuracy") for name in (ours, DENSE)}
        gap = paired(right[DENSE], right[ours])
        made.append(
            Claim(
                where,
                f"{ours} reaches dense SGD's test accuracy",
                "not in the notes",
                f"{np.mean(right[ours]):.2%} and {np.mean(right[DENSE]):.2%}; dense − ours {gap}",
                as_good(gap, POINTS),
                f"{differs}“reaches”: surely less than {POINTS:.0%} below; {TESTED} images tested, and at a constant "
                "learning rate the last epoch's accuracy scatters by some points from seed to seed",
            )
        )
    return made


def as_good(gap: Difference, margin: float) -> bool:
    """Whether what is above by `gap` is surely above by less than the margin."""
    return gap.mean + gap.half_width < margin


def _both(losses: dict[str, list[float]], *names: str) -> str:
    return ", ".join(f"{name} {np.mean(losses[name]):.3f}" for name in names)


def _rates(rates: dict[str, float], *names: str) -> str:
    chosen = " and ".join(f"{rates[name]:g}" for name in names)
    return f"learning rates {chosen}, the best of {GRID[0]:g}, doubled up to {GRID[-1]:g}, on another seed"


def draw(found: Runs, folder: Path) -> list[Path]:
    """Training loss and test accuracy against epochs, a figure of each for each group."""
    drawn = []
    for group, names in GROUPS.items():
        for key, label in (("loss", "training loss"), ("accuracy", "test accuracy")):
            lines = [
                Curve(
                    name,
                    [epoch["epoch"] for epoch in found[name][0]["epochs"]],
                    [[epoch[key] for epoch in record["epochs"]] for record in found[name]],
                )
                for name in names
            ]
            drawn.append(curves(folder / f"{slug(group)}-{key}-epochs.png", lines, "epoch", label))
    return drawn
