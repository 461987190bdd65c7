"""Tables 1 and 2 and Figure 4 of Marsit: how well small networks are trained by each method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from apps.plotting import Curve, curves
from apps.records import Record
from apps.reproduce.claims import Claim, Difference, paired
from apps.reproduce.networks import Task, trained
from apps.reproduce.parallel import side_by_side
from apps.reproduce.results import Book
from apps.reproduce.tuning import climb
from mpicomp import SSDM, CascadingSSDM, Dense, EFSignSGD, MajorityVote, Marsit
from mpicomp.algorithms import Algorithm

TUNING_SEED = 1000  # of the runs that choose a rate; no other has it
FAILED = 50.0  # per cent, below which training counts as failed

CASCADES: dict[str, Algorithm] = {
    "dense": Dense(),
    "cascading": CascadingSSDM(),
    "cascading, normalised": CascadingSSDM(normalise=True),
}
CASCADE_RATES = (0.03, 0.01, 0.005)
DIGITS = ("--dataset", "digits", "--model", "cnn", "--width", "8", "--batch", "16", "--optimizer", "momentum")
CASCADE_TASKS = {3: Task((*DIGITS, "--epochs", "7"), 3), 8: Task((*DIGITS, "--epochs", "18"), 8)}  # 200 steps

DECAY = ("--warmup-epochs", "0.5", "--decay", "cosine", "--batch", "16", "--optimizer", "momentum")
TASKS = {
    "MLP, digits": Task(("--dataset", "digits", "--epochs", "15", *DECAY), 4),
    "CNN, Fashion-MNIST": Task(
        ("--dataset", "fashion-mnist", "--model", "cnn", "--width", "8", "--epochs", "5", *DECAY), 4, "ring", 6000, 2000
    ),
}
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
METHODS: dict[str, tuple[Algorithm, float]] = {
    "PSGD": (Dense(), 0.03),
    "signSGD": (MajorityVote(), 0.001),
    "EF-signSGD": (EFSignSGD(), 0.03),
    "SSDM": (SSDM(), 0.003),
    "Marsit-100": (Marsit(100), 0.03),
    "Marsit": (Marsit(None), 0.03),
}
"""The methods, and the rate where the search for each one's best begins."""
# The paper's accuracies of AlexNet and ResNet-20 on CIFAR-10, in its order of methods.
PAPER = {
    "PSGD": (82.38, 93.42),
    "signSGD": (80.74, 88.92),
    "EF-signSGD": (82.25, 91.85),
    "SSDM": (81.89, 89.18),
    "Marsit-100": (82.30, 92.18),
    "Marsit": (81.58, 90.15),
}


def table_1(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Cascading compression against none, on 3 ranks and on 8, each at the best of the paper's rates."""
    seeds = min(seeds, 10 if full else 3)
    plan = [
        (ranks, name, lr, seed) for seed in range(seeds) for ranks in CASCADE_TASKS for name in CASCADES
        for lr in CASCADE_RATES
    ]  # fmt: skip
    runs = side_by_side(
        [
            partial(trained, book, f"table-1-{ranks}-{_slug(name)}-{lr}", CASCADE_TASKS[ranks], CASCADES[name], seed,
                    ("--lr", str(lr)))
            for ranks, name, lr, seed in plan
        ]
    )  # fmt: skip
    by_case: dict[tuple[int, str], dict[float, list[Record]]] = {}
    for (ranks, name, lr, _), run in zip(plan, runs, strict=True):
        by_case.setdefault((ranks, name), {}).setdefault(lr, []).append(run)
    best = {case: max(of_rate.values(), key=_mean) for case, of_rate in by_case.items()}
    return _cascades({case: [100 * run["accuracy"] for run in runs] for case, runs in best.items()}, best, seeds), []


def _cascades(
    found: dict[tuple[int, str], list[float]], runs: dict[tuple[int, str], list[Record]], seeds: int
) -> list[Claim]:
    differs = f"CNN on 8 x 8 digits for AlexNet on MNIST; 200 steps of 16 images a rank, {seeds} seeds"
    said = {3: "87.2 ± 2.31 (none: 99.1)", 8: "diverges (none: 99.2)"}
    claims = []
    for ranks, name in found:
        if name == "dense":
            continue
        here, dense = found[ranks, name], found[ranks, "dense"]
        loss = paired(here, dense)
        stopped = sum(run["diverged"] for run in runs[ranks, name])
        ended = f" ({stopped} of {seeds} runs ended in NaN or infinity)" if stopped else ""
        trains = bool(np.mean(here) >= FAILED)
        claims.append(
            Claim(
                "Table 1",
                f"M = {ranks}: {name} " + ("trains, but worse than none" if ranks == 3 else "fails"),
                said[ranks],
                f"{np.mean(here):.1f} %{ended}, none {np.mean(dense):.1f} %: {loss}",
                loss.below and trains if ranks == 3 else loss.below and not trains,
                differs + ("" if trains or ranks > 3 else "; it fails already: its signs are a coin's, see Fig. 1b"),
            )
        )
    name = "cascading, normalised"
    worse, better = paired(found[8, name], found[3, name]), paired(found[8, "dense"], found[3, "dense"])
    claims.append(
        Claim(
            "Table 1",
            "more workers: cascading compression gets worse, none does not",
            "87.2 → diverges; 99.1 → 99.2",
            f"M = 8 − M = 3: {name} {worse}, none {better}",
            worse.below and not better.below,
            f"the same runs; a run below {FAILED:.0f} % has failed, and cannot get much worse",
        )
    )
    return claims


def table_2(book: Book, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """All methods, each at its best rate for a seed apart; and accuracy against bytes from the same runs."""
    claims, figures = [], []
    for column, (title, task) in enumerate(TASKS.items()):
        most = 10 if full else 5 - column
        rates = tuned(book, title, task)
        plan = [(seed, name) for seed in range(min(seeds, most)) for name in METHODS]
        runs = side_by_side([_run(book, title, task, name, rates[name], seed) for seed, name in plan])
        found: dict[str, list[Record]] = {name: [] for name in METHODS}
        for (_, name), run in zip(plan, runs, strict=True):
            found[name].append(run)
        ends = {name: [100 * run["accuracy"] for run in of_name] for name, of_name in found.items()}
        differs = f"{title}, 4 ranks, 16 images each, {min(seeds, most)} seeds, rate by one seed more: "
        claims += accuracies(title, column, ends, {name: f"{differs}{rates[name]:g}" for name in METHODS})
        claims += budget(title, found)
        lines = [
            Curve(name, [epoch["bytes_so_far_per_rank"] / 1e6 for epoch in of_name[0]["epochs"]],
                  [[100 * epoch["accuracy"] for epoch in run["epochs"]] for run in of_name])
            for name, of_name in found.items() if not any(run["diverged"] for run in of_name)
        ]  # fmt: skip
        path = book.folder / f"figure-4-{_slug(title)}.png"
        figures.append(curves(path, lines, "MB that a rank sent", "test accuracy, %", log_x=True))
    return claims, figures


def tuned(book: Book, title: str, task: Task) -> dict[str, float]:
    """Each method's best rate for a seed of its own."""

    def accuracy(plan: list[tuple[str, float]]) -> list[float]:
        runs = side_by_side([_run(book, title, task, name, rate, TUNING_SEED) for name, rate in plan])
        return [run["accuracy"] for run in runs]

    return climb(RATES, {name: first for name, (_, first) in METHODS.items()}, accuracy)


def accuracies(title: str, column: int, ends: dict[str, list[float]], differs: dict[str, str]) -> list[Claim]:
    """A line for each method: the older ones lose to dense, Marsit for sure loses no more than in the paper."""
    claims = []
    for name, values in ends.items():
        said, dense = PAPER[name][column], PAPER["PSGD"][column]
        loss = paired(values, ends["PSGD"]) if name != "PSGD" else None
        what, holds = f"{title}: {name}", None
        if loss is not None and name.startswith("Marsit"):
            what, holds = f"{what} loses {dense - said:.2f} points or less", _within(loss, said - dense)
        elif loss is not None:
            what, holds = f"{what} loses accuracy", loss.below
        claims.append(
            Claim(
                "Table 2",
                what,
                f"{said:.2f} %" + ("" if loss is None else f" ({said - dense:+.2f})"),
                f"{np.mean(values):.2f} %" + ("" if loss is None else f" ({loss})"),
                holds,
                differs[name],
            )
        )
    others = {name: paired(ends["Marsit-100"], ends[name]) for name in ("signSGD", "EF-signSGD", "SSDM")}
    claims.append(
        Claim(
            "Table 2",
            f"{title}: Marsit-100 is best of the compressed ones",
            "+1.56, +0.05, +0.41" if column == 0 else "+3.26, +0.33, +3.00",
            "over " + ", ".join(f"{name} {gain}" for name, gain in others.items()),
            not any(gain.below for gain in others.values()) and any(gain.above for gain in others.values()),
            "yes: above one of them, and below none, with confidence",
        )
    )
    return claims


def _within(loss: Difference, stated: float) -> bool:
    """Whether confidence rules out a loss beyond the stated one."""
    return loss.mean - loss.half_width >= stated


def budget(title: str, found: dict[str, list[Record]]) -> list[Claim]:
    """What is sent until training is as good as the worst of these methods is at its end."""
    reached = min(float(np.mean([run["accuracy"] for run in runs])) for runs in found.values())
    sent = {name: float(np.mean([_bytes_until(run, reached) for run in runs])) for name, runs in found.items()}
    total = {name: runs[0]["epochs"][-1]["bytes_so_far_per_rank"] for name, runs in found.items() if runs[0]["epochs"]}
    others = [value for name, value in sent.items() if not name.startswith("Marsit")]
    return [
        Claim(
            "Fig. 4b",
            f"{title}: Marsit sends least for an accuracy",
            "90 % less than PSGD, 70 % less than signSGD and its like",
            f"until {100 * reached:.1f} %, MB per rank: "
            + ", ".join(f"{name} {value / 1e6:.3g}" for name, value in sent.items())
            + f"; in all Marsit sends {1 - total['Marsit'] / total['PSGD']:.0%} less than PSGD, "
            f"{1 - total['Marsit'] / total['signSGD']:.0%} less than signSGD",
            max(sent["Marsit"], sent["Marsit-100"]) < min(others),
            "the runs of Table 2, headers and all; looked at after each epoch, by the accuracy of the method that ends "
            "lowest",
        )
    ]


def _bytes_until(run: Record, accuracy: float) -> float:
    """Sent by a rank until an epoch ends with that accuracy; infinite if none does."""
    sent = [epoch["bytes_so_far_per_rank"] for epoch in run["epochs"] if epoch["accuracy"] >= accuracy]
    return float(sent[0]) if sent else float("inf")


def _run(book: Book, title: str, task: Task, name: str, rate: float, seed: int) -> partial[Record]:
    record = f"table-2-{_slug(title)}-{_slug(name)}-{rate:g}"
    return partial(trained, book, record, task, METHODS[name][0], seed, ("--lr", f"{rate:g}"))


def _mean(runs: Sequence[Record]) -> float:
    return float(np.mean([run["accuracy"] for run in runs]))


def _slug(name: str) -> str:
    return name.lower().replace(",", "").replace(" ", "-")
