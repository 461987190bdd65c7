"""The study as a figure and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.finetune.examples import LABELS, TEST
from apps.finetune.methods import DENSE, RATES
from apps.performance.part import get, table
from apps.plotting import Curve, draw_curves, legend, new_figure, save
from apps.records import Record

Runs = Mapping[str, Sequence[Record]]
"""The runs of each method, by seed; of all methods the same seeds."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error, in per cent or points."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """The mean of 2 values or more."""
        return cls(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(len(values))))

    def text(self, sign: str = "") -> str:
        """Two decimals."""
        return f"{self.mean:{sign}.2f} ± {self.error:.2f}".replace("-", "−")


def draw(runs: Runs, path: Path) -> Path:
    """Draw accuracy and loss against steps: means, and shaded from the least to the greatest seed; returns the path."""
    figure, ((left, right),) = new_figure(2, size=(10, 4), sharey=False)
    for axes, key, factor, label in ((left, "accuracy", 100.0, "test accuracy, %"), (right, "loss", 1.0, "test loss")):
        curves = [
            Curve(name, records[0]["steps"], [[factor * value for value in record[key]] for record in records])
            for name, records in runs.items()
        ]
        draw_curves(axes, curves)
        axes.set(xlabel="steps", ylabel=label)
    legend(figure, left.get_lines())
    return save(figure, path)


def markdown(runs: Runs) -> str:
    """The table of the ends of all runs, and how far apart they are."""
    ends = {name: [100 * record["accuracy"][-1] for record in records] for name, records in runs.items()}
    rows = [
        {
            "name": name,
            "rate": f"{RATES[name]:g}",
            "accuracy": Estimate.of(ends[name]).text(),
            "difference": "" if name == DENSE else difference(ends[name], ends[DENSE]).text("+"),
            "loss": Estimate.of([record["loss"][-1] for record in records]).text(),
            "bits": f"{records[0]['bits_per_element']:.2f}",
        }
        for name, records in runs.items()
    ]
    headings = {
        "name": "method", "rate": "learning rate", "accuracy": "test accuracy, %",
        "difference": "difference to dense, points", "loss": "test loss", "bits": "bits per element",
    }  # fmt: skip
    text = table([(heading, get(key)) for key, heading in headings.items()], rows)
    return f"{text}\n\n{distances(ends)}"


def difference(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The mean difference of runs of the same seed."""
    return Estimate.of([one - other for one, other in zip(ours, theirs, strict=True)])


def distances(ends: Mapping[str, Sequence[float]]) -> str:
    """A sentence: the methods' accuracies against their standard errors."""
    found = {name: Estimate.of(values) for name, values in ends.items()}
    n_test, n_seeds = TEST * len(LABELS), len(next(iter(ends.values())))
    best = max(found, key=lambda name: found[name].mean)
    worst = min(found, key=lambda name: found[name].mean)
    drawn = {name: 100 * np.sqrt(one.mean / 100 * (1 - one.mean / 100) / n_test) for name, one in found.items()}
    both = [np.hypot(one.error, drawn[name]) for name, one in found.items()]
    return (
        f"{n_seeds} seeds, {n_test} test examples. Between the best method, {best}, and the last, {worst}, lie "
        f"{found[best].mean - found[worst].mean:.2f} points. One standard error of an accuracy is "
        f"{min(both):.2f} to {max(both):.2f} points: {min(drawn.values()):.2f} or more by the choice of the test "
        f"examples, and up to {max(one.error for one in found.values()):.2f} by the seeds."
    )
