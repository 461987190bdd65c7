"""The study as a figure and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from apps.figure_style import FAINT, looks_of
from apps.finetune.examples import LABELS, TEST
from apps.finetune.methods import DENSE, RATES
from apps.performance.part import get, table
from apps.plotting import headline, named_ticks, new_figure, save
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


def summary(runs: Runs) -> Record:
    """The numbers that the figure shows: accuracies at the end, their standard errors over seeds, bits per element."""
    rows = []
    for name, records in runs.items():
        end = Estimate.of([100 * record["accuracy"][-1] for record in records])
        bits = records[0]["bits_per_element"]
        rows.append({"name": name, "accuracy": end.mean, "error": end.error, "bits_per_element": bits})
    return {
        "source": "Records of python -m apps.finetune", "seeds": len(next(iter(runs.values()))),
        "test_examples": TEST * len(LABELS), "methods": rows,
    }  # fmt: skip


def draw(found: Record, path: Path) -> Path:
    """Draw the accuracies of a `summary` with one standard error, the best above; returns the path."""
    rows = sorted(found["methods"], key=lambda row: -float(row["accuracy"]))
    figure, ((axes,),) = new_figure(height=0.42 * len(rows) + 1.7)
    looks = looks_of(row["name"] for row in rows)
    for place, row in enumerate(rows):
        look = looks[row["name"]]
        axes.errorbar(row["accuracy"], place, xerr=row["error"], color=look.color, marker=look.marker, capsize=4)
        less = 32 / row["bits_per_element"]
        bits = f"{row['bits_per_element']:.3g} bits an element" + (f", {less:.3g} times fewer" if less > 1 else "")
        axes.annotate(bits, (1.0, place), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=8.5)  # fmt: skip
        if row["name"] == DENSE:
            axes.axvline(row["accuracy"], color=FAINT, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
    named_ticks(axes.yaxis, range(len(rows)), [row["name"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(ylim=(len(rows) - 0.5, -0.5), xlabel="test accuracy after the last step, %")
    share = float(np.mean([row["accuracy"] for row in rows])) / 100
    chosen = 100 * np.sqrt(share * (1 - share) / found["test_examples"])
    note = (
        f"A transformer of 22 million parameters on a task of nine classes; two ranks, {found['seeds']} seeds: mean "
        f"and one standard error over them. The choice of the {found['test_examples']} test examples adds an error of "
        f"{chosen:.1f} points that all methods share."
    )
    headline(figure, finding(rows), note)
    return save(figure, path)


def finding(rows: Sequence[Record]) -> str:
    """The title: how far behind dense the others end, and how many times fewer bits they send."""
    dense = next(row for row in rows if row["name"] == DENSE)
    others = [row for row in rows if row is not dense]
    if not others:
        return f"Fine-tuning with dense ends with {dense['accuracy']:.1f} % of test accuracy"
    behind = sorted(dense["accuracy"] - row["accuracy"] for row in others)
    fewer = sorted(dense["bits_per_element"] / row["bits_per_element"] for row in others)
    bits = " to ".join(dict.fromkeys(f"{one:.0f}" for one in (fewer[0], fewer[-1])))
    points = " to ".join(dict.fromkeys(f"{one:.1f}" for one in (behind[0], behind[-1])))
    return f"Fine-tuning with {bits} times fewer bits ends {points} points below dense's accuracy"


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
