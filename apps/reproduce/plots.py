"""Curves with the spread over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes


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
    _draw(axes, lines)
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


def panels(path: Path, grid: Sequence[Sequence[tuple[str, Sequence[Curve]]]], x_label: str, y_label: str) -> Path:
    """Draw a grid of titled panels with one legend above; x begins at 0. Returns the path."""
    n_rows, n_columns = len(grid), len(grid[0])
    size = (4 * n_columns, 3 * n_rows + 0.5)
    figure, axes = plt.subplots(n_rows, n_columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for row, titled in zip(axes, grid, strict=True):
        for part, (title, lines) in zip(row, titled, strict=True):
            _draw(part, lines)
            part.set_title(title, fontsize="medium")
            part.set_xlim(left=0)
            part.grid(alpha=0.3)
    figure.supxlabel(x_label)
    figure.supylabel(y_label)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw(axes: Axes, lines: Sequence[Curve]) -> None:
    for line in lines:
        values = np.asarray(line.runs, np.float64)
        (drawn,) = axes.plot(line.x, values.mean(axis=0), label=line.name)
        if len(values) > 1:
            axes.fill_between(line.x, values.min(axis=0), values.max(axis=0), color=drawn.get_color(), alpha=0.2)


@dataclass(frozen=True)
class Bars:
    """A panel of bars that are made of parts.

    Attributes
    ----------
    title : str
    parts : dict
        Of each bar by name: how long its parts are, in the order of the legend.
    """

    title: str
    parts: dict[str, Sequence[float]]


def stacked_bars(path: Path, panels: Sequence[Bars], names: Sequence[str], x_label: str) -> Path:
    """Draw panels side by side, with one legend for the parts; returns the path."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1.5 + 4 * len(panels), 3.6), sharex=True, sharey=True, squeeze=False
    )
    figure.set_layout_engine("constrained")
    colors = ["0.55", "C3", "C1", "C2", "C0", "0.85", "C4", "C5"]
    for axis, panel in zip(axes[0], panels, strict=True):
        for place, parts in enumerate(panel.parts.values()):
            ends = np.cumsum(parts)
            for end, length, color in zip(ends, parts, colors, strict=False):
                axis.barh(place, length, left=end - length, color=color, height=0.7)
            axis.text(ends[-1], place, f" {ends[-1]:.3g}", va="center", fontsize=8)
        axis.set_yticks(range(len(panel.parts)), list(panel.parts))
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(x_label)
        axis.margins(x=0.12)
    axes[0][0].invert_yaxis()
    patches = [mpl.patches.Patch(color=color, label=name) for name, color in zip(names, colors, strict=False)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
