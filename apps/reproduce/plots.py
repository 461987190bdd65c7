"""Curves with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt


@dataclass(frozen=True)
class Curve:
    """A method's.

    Attributes
    ----------
    name : str
    x : sequence of float
    runs : sequence of sequence of float
        y of each seed.
    """

    name: str
    x: Sequence[float]
    runs: Sequence[Sequence[float]]


def curves(
    path: Path, lines: Sequence[Curve], x_label: str, y_label: str, *, log: bool = False, log_x: bool = False
) -> Path:
    """Draw means, and shaded from the least to the greatest of the seeds; returns the path."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for line in lines:
        values = np.asarray(line.runs, np.float64)
        (drawn,) = axes.plot(line.x, values.mean(axis=0), label=line.name)
        if len(values) > 1:
            axes.fill_between(line.x, values.min(axis=0), values.max(axis=0), color=drawn.get_color(), alpha=0.2)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if log:
        axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
