"""Table 2 and Figure 4 of Marsit: the accuracy of small networks that each method trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.networks import Task, per_epoch, trained
from apps.studies.parallel import run_seeds
from apps.studies.results import Results, slug
from apps.studies.tuning import climb
from mpicomp import SSDM, Dense, EFSignSGD, MajorityVote, Marsit
from mpicomp.algorithms import Algorithm

TUNING_SEED = 1000  # of the runs that choose a learning rate, and of no others
DECAY = ("--warmup-epochs", "0.5", "--decay", "cosine", "--batch", "16", "--optimizer", "momentum")
TASKS = {
    "MLP, digits": Task(("--dataset", "digits", "--epochs", "15", *DECAY), 4),
    "CNN, Fashion-MNIST": Task(
        ("--dataset", "fashion-mnist", "--model", "cnn", "--width", "8", "--epochs", "5", *DECAY), 4, "ring", 6000, 2000
    ),
}
LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
METHODS: dict[str, tuple[Algorithm, float, tuple[float, float]]] = {
    "PSGD": (Dense(), 0.03, (82.38, 93.42)),
    "signSGD": (MajorityVote(), 0.001, (80.74, 88.92)),
    "EF-signSGD": (EFSignSGD(), 0.03, (82.25, 91.85)),
    "SSDM": (SSDM(), 0.003, (81.89, 89.18)),
    "Marsit-100": (Marsit(100), 0.03, (82.30, 92.18)),
    "Marsit": (Marsit(None), 0.03, (81.58, 90.15)),
}
"""The methods, the rate at which the search for the best one of each begins, and the paper's accuracies of AlexNet and
ResNet-20 on CIFAR-10."""


def table_2(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train by all methods, each at its best learning rate on another seed; draw accuracy against bytes."""
    claims: list[Claim] = []
    figures = []
    for column, title in enumerate(TASKS):
        n_seeds = min(seeds, 10 if full else 5 - column)
        rates, found = learn(results, title, n_seeds)
        ends = {name: [100 * record["accuracy"] for record in records] for name, records in found.items()}
        differs = f"{title}, 4 ranks, 16 images each, {n_seeds} seeds, rate by one seed more: "
        claims += accuracies(title, column, ends, {name: f"{differs}{rates[name]:g}" for name in METHODS})
        claims.append(budget(title, found))
        lines = [
            Curve(name, per_epoch(records, "bytes_so_far_per_rank", 1e-6)[0], per_epoch(records, "accuracy", 100))
            for name, records in found.items() if not any(record["diverged"] for record in records)
        ]  # fmt: skip
        path = results.folder / f"figure-4-{slug(title)}.png"
        figures.append(curves(path, lines, "MB that a rank sent", "test accuracy, %", log_x=True))
    return claims, figures


def learn(results: Results, title: str, seeds: int) -> tuple[dict[str, float], dict[str, list[Record]]]:
    """The learning rate of each method for a task, and its runs at that rate, by seed."""

    def run(name: str, rate: float, seed: int) -> partial[Record]:
        record = f"table-2-{slug(title)}-{slug(name)}-{rate:g}"
        return partial(trained, results, record, TASKS[title], METHODS[name][0], seed, ("--lr", f"{rate:g}"))

    first = {name: rate for name, (_, rate, _) in METHODS.items()}
    rates = climb(LEARNING_RATES, first, partial(run, seed=TUNING_SEED), lambda record: record["accuracy"])
    return rates, run_seeds(METHODS, seeds, lambda name, seed: run(name, rates[name], seed))


def accuracies(title: str, column: int, ends: dict[str, list[float]], differs: dict[str, str]) -> list[Claim]:
    """A claim for each method: the older ones lose to dense, Marsit surely loses no more than in the paper."""
    claims = []
    for name, values in ends.items():
        published, dense = METHODS[name][2][column], METHODS["PSGD"][2][column]
        loss = paired(values, ends["PSGD"]) if name != "PSGD" else None
        what, holds = f"{title}: {name}", None
        if loss is not None and name.startswith("Marsit"):
            what, holds = f"{what} loses {dense - published:.2f} points or less", loss.least >= published - dense
        elif loss is not None:
            what, holds = f"{what} loses accuracy", loss.below
        paper = f"{published:.2f} %" + ("" if loss is None else f" ({published - dense:+.2f})")
        ours = f"{np.mean(values):.2f} %" + ("" if loss is None else f" ({loss})")
        claims.append(Claim("Table 2", what, paper, ours, holds, differs[name]))
    others = {name: paired(ends["Marsit-100"], ends[name]) for name in ("signSGD", "EF-signSGD", "SSDM")}
    claims.append(
        Claim(
            "Table 2",
            f"{title}: Marsit-100 is best of the compressed methods",
            "+1.56, +0.05, +0.41" if column == 0 else "+3.26, +0.33, +3.00",
            "over " + ", ".join(f"{name} {gain}" for name, gain in others.items()),
            not any(gain.below for gain in others.values()) and any(gain.above for gain in others.values()),
            "yes: with confidence, it is above one of them, and below none",
        )
    )
    return claims


def budget(title: str, found: dict[str, list[Record]]) -> Claim:
    """The bytes until a method reaches the accuracy of the method that is worst at its end."""
    reached = min(float(np.mean([run["accuracy"] for run in runs])) for runs in found.values())
    sent = {name: float(np.mean([_bytes_until(run, reached) for run in runs])) for name, runs in found.items()}
    others = [value for name, value in sent.items() if not name.startswith("Marsit")]
    return Claim(
        "Fig. 4b",
        f"{title}: Marsit sends least for an accuracy",
        "90 % less than PSGD, 70 % less than signSGD and similar methods",
        f"until {100 * reached:.1f} %, MB per rank: "
        + ", ".join(f"{name} {value / 1e6:.3g}" for name, value in sent.items())
        + "".join(
            f"; {name} sends {less(sent[name], sent['PSGD'])} than PSGD "
            f"and {less(sent[name], sent['signSGD'])} than signSGD"
            for name in ("Marsit", "Marsit-100")
        ),
        max(sent["Marsit"], sent["Marsit-100"]) < min(others),
        "the runs of Table 2, all bytes counted, after each epoch; the accuracy is that of the method that ends lowest",
    )


def less(ours: float, theirs: float) -> str:
    """Compare the bytes that two methods sent until the same accuracy."""
    if np.inf in (ours, theirs):
        return "an unknown part less"
    return f"{abs(1 - ours / theirs):.0%} {'less' if ours <= theirs else 'more'}"


def _bytes_until(run: Record, accuracy: float) -> float:
    """The bytes that a rank sent until an epoch ended with that accuracy; infinite if no epoch did."""
    sent = [epoch["bytes_so_far_per_rank"] for epoch in run["epochs"] if epoch["accuracy"] >= accuracy]
    return float(sent[0]) if sent else float("inf")
