"""Accuracy against the dense all-reduce at equal learning rates. The paper has no such table.

Differences are paired: runs of the same seed share weights and the order of images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from apps.records import Record
from apps.reproduce.claims import Claim
from apps.reproduce.networks import Task, trained
from apps.studies.parallel import Run, run_seeds
from apps.studies.results import Results
from mpicomp import Dense, Marsit, Relay
from mpicomp.algorithms import Algorithm

GLOBAL_BATCH = {"digits": 64, "fashion-mnist": 256}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "digits": ("--hidden", "128", "--epochs", "40", "--warmup-epochs", "1", "--decay", "cosine"),
    "fashion-mnist": ("--hidden", "256", "--epochs", "5", "--warmup-epochs", "0.25", "--decay", "cosine"),
}
GRIDS = (("digits", 4), ("fashion-mnist", 4), ("digits", 8))
"""Dataset and ranks; without --full the first alone."""
RATES = (("momentum", 0.01), ("momentum", 0.05), ("momentum", 0.2), ("adam", 0.001), ("adam", 0.003))
DENSE = "dense"
METHODS: Mapping[str, Algorithm] = {
    DENSE: Dense(),
    "Marsit, K = 100": Marsit(100),
    "Marsit, K = none": Marsit(None),
    "K = 1": Marsit(1),
    '"paper", K = 100': Marsit(100, residual="paper"),
    "2 winners, K = 100": Marsit(100, winners=2),
    "2 winners, K = none": Marsit(None, winners=2),
    "1 winner, K = 100": Marsit(100, winners=1),
    "1 winner, K = none": Marsit(None, winners=1),
    "Relay, updates": Relay(),
    "Relay, gradients": Relay(16),
}
OWN_OPTIONS: Mapping[str, tuple[str, ...]] = {"Relay, gradients": ("--synchronize", "gradients")}
MOST_LOST = {"Marsit, K = 100": 0.5, "Marsit, K = none": 0.8, "Relay, updates": 0.2, "Relay, gradients": 0.2}
"""Points of accuracy."""
Runs = dict[tuple[str, float, str], list[Record]]
"""The runs of a grid by optimizer, learning rate and method; one run for each seed."""


@dataclass(frozen=True)
class FixedRate:
    """One training by a method of `METHODS`."""

    dataset: str
    ranks: int
    optimizer: str
    lr: float
    method: str

    @property
    def task(self) -> Task:
        """The training, without options of the method."""
        batch = max(1, GLOBAL_BATCH[self.dataset] // self.ranks)
        return Task(("--dataset", self.dataset, "--batch", str(batch), *OPTIONS[self.dataset]), self.ranks)

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the method's run."""
        return ("--optimizer", self.optimizer, "--lr", f"{self.lr:g}", *OWN_OPTIONS.get(self.method, ()))

    @property
    def name(self) -> str:
        """Name in files."""
        return f"fixed-{self.dataset}-{self.ranks}-{self.optimizer}-{self.lr:g}-{_slug(self.method)}"

    def settings(self, seed: int) -> Record:
        """All that the result depends on."""
        return self.task.settings(METHODS[self.method], seed, self.options)

    def run(self, results: Results, seed: int) -> Run:
        """Function that trains, or reads the result that is there."""
        return partial(trained, results, self.name, self.task, METHODS[self.method], seed, self.options)


def fixed_rates(results: Results, seeds: int, full: bool) -> tuple[list[Claim], list[Path]]:
    """Train all methods at all rates, and write the tables beside the figures."""
    seeds, claims, texts = min(seeds, 5 if full else 3), [], []
    for dataset, ranks in GRIDS if full else GRIDS[:1]:
        found = train_all(results, dataset, ranks, seeds)
        texts.append(f"**{dataset}, {ranks} ranks**\n\n{render(found)}")
        claims += [_claim(found, method, f"{dataset}, {ranks} ranks", seeds) for method in MOST_LOST]
    path = results.folder / "fixed-rates.md"
    path.write_text("\n\n".join(texts) + "\n")
    return claims, [path]


def train_all(results: Results, dataset: str, ranks: int, seeds: int, methods: Sequence[str] = tuple(METHODS)) -> Runs:
    """Train these methods at each rate, or read the results that are there."""

    def make(case: tuple[str, float, str], seed: int) -> Run:
        return FixedRate(dataset, ranks, *case).run(results, seed)

    return run_seeds([(*rate, method) for rate in RATES for method in methods], seeds, make)


def render(found: Runs) -> str:
    """Markdown: dense's accuracy in per cent, and the other methods' differences to it in points."""
    others = [method for method in METHODS if method != DENSE]
    lines = [["optimizer, rate", *METHODS], ["---", *["---:"] * len(METHODS)]]
    for optimizer, lr in RATES:
        dense = _spread([100 * run["accuracy"] for run in found[optimizer, lr, DENSE]], "")
        cells = [_spread(lost(found, optimizer, lr, method), "+") for method in others]
        lines.append([f"{optimizer} {lr:g}", dense, *cells])
    lines.append(["target", *(f"≥ −{MOST_LOST[method]:g}" if method in MOST_LOST else "" for method in METHODS)])
    bits = {method: [run["epochs"][-1]["bits_per_element"] for (*_, name), runs in found.items() if name == method
                     for run in runs if run["epochs"]] for method in METHODS}  # fmt: skip
    lines.append(["bits/element", *(f"{np.mean(of_one):.2f}" if of_one else "–" for of_one in bits.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def lost(found: Runs, optimizer: str, lr: float, method: str) -> list[float]:
    """Differences to dense of each seed, in points; a run that diverged has the accuracy of a guess."""
    pairs = zip(found[optimizer, lr, method], found[optimizer, lr, DENSE], strict=True)
    return [100 * (run["accuracy"] - dense["accuracy"]) for run, dense in pairs]


def _claim(found: Runs, method: str, where: str, seeds: int) -> Claim:
    means = {f"{optimizer} {lr:g}": float(np.mean(lost(found, optimizer, lr, method))) for optimizer, lr in RATES}
    worst = min(means, key=lambda rate: means[rate])
    reached = sum(mean >= -MOST_LOST[method] for mean in means.values())
    return Claim(
        "–",
        f"{where}: {method} loses at most {MOST_LOST[method]} points to dense at the same rate",
        "Table 2 has one rate for each method",
        f"at {reached} of {len(RATES)} rates; most at {worst}: {means[worst]:+.2f}",
        reached == len(RATES),
        f"a perceptron of one hidden layer, cosine decay, {seeds} seeds; means over seeds are judged",
    )


def _spread(points: Sequence[float], sign: str) -> str:
    """Mean and standard deviation."""
    spread = f" ± {np.std(points, ddof=1):.2f}" if len(points) > 1 else ""
    return f"{np.mean(points):{sign}.2f}{spread}".replace("-", "−")


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())
