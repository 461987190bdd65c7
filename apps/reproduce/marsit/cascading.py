"""Table 1 of Marsit: cascading compression against none, on 3 ranks and on 8."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np

from apps.records import Record
from apps.reproduce.claims import Claim, paired
from apps.reproduce.networks import Task, trained
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results, slug
from mpicomp import CascadingSSDM, Dense
from mpicomp.algorithms import Algorithm

FAILED = 50.0  # per cent; training with a lower accuracy counts as failed
METHODS: dict[str, Algorithm] = {
    "dense": Dense(),
    "cascading": CascadingSSDM(),
    "cascading, normalised": CascadingSSDM(normalise=True),
}
LEARNING_RATES = (0.03, 0.01, 0.005)
DIGITS = ("--dataset", "digits", "--model", "cnn", "--width", "8", "--batch", "16", "--optimizer", "momentum")
TASKS = {3: Task((*DIGITS, "--epochs", "7"), 3), 8: Task((*DIGITS, "--epochs", "18"), 8)}  # 200 steps
PAPER = {3: "87.2 ± 2.31 (none: 99.1)", 8: "diverges (none: 99.2)"}

Case = tuple[int, str]
"""Number of ranks and name of the method."""


def table_1(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train each case at each learning rate of the paper, and judge the best rate of each case."""
    seeds = min(seeds, 10 if full else 3)

    def make(case: tuple[int, str, float], seed: int) -> Run:
        ranks, name, lr = case
        record = f"table-1-{ranks}-{slug(name)}-{lr}"
        return partial(trained, results, record, TASKS[ranks], METHODS[name], seed, ("--lr", str(lr)))

    plan = [(ranks, name, lr) for ranks in TASKS for name in METHODS for lr in LEARNING_RATES]
    found = run_seeds(plan, seeds, make)
    best = {
        (ranks, name): max((found[ranks, name, lr] for lr in LEARNING_RATES), key=_mean_accuracy)
        for ranks in TASKS for name in METHODS
    }  # fmt: skip
    return judge(best, seeds), []


def judge(runs: dict[Case, list[Record]], seeds: int) -> list[Claim]:
    """Check whether cascading compression loses accuracy on 3 ranks, fails on 8, and gets worse with more ranks."""
    accuracy = {case: [100 * run["accuracy"] for run in of_case] for case, of_case in runs.items()}
    differs = f"CNN on 8 x 8 digits for AlexNet on MNIST; 200 steps of 16 images per rank, {seeds} seeds"
    claims = []
    for (ranks, name), here in accuracy.items():
        if name == "dense":
            continue
        dense = accuracy[ranks, "dense"]
        loss = paired(here, dense)
        stopped = sum(run["diverged"] for run in runs[ranks, name])
        ended = f" ({stopped} of {seeds} runs ended in NaN or infinity)" if stopped else ""
        trains = bool(np.mean(here) >= FAILED)
        claims.append(
            Claim(
                "Table 1",
                f"M = {ranks}: {name} " + ("trains, but worse than none" if ranks == 3 else "fails"),
                PAPER[ranks],
                f"{np.mean(here):.1f} %{ended}, none {np.mean(dense):.1f} %: {loss}",
                loss.below and trains == (ranks == 3),
                differs
                + ("" if trains or ranks > 3 else "; it fails already: its signs are as random as a coin, see Fig. 1b"),
            )
        )
    name = "cascading, normalised"
    worse, better = paired(accuracy[8, name], accuracy[3, name]), paired(accuracy[8, "dense"], accuracy[3, "dense"])
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


def _mean_accuracy(runs: list[Record]) -> float:
    return float(np.mean([run["accuracy"] for run in runs]))
