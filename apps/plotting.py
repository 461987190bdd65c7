"""Figures: how they are made and saved, curves with the spread over seeds, and bars that are made of parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

mpl.use("Agg")  # files are all that is drawn to

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

COLORS = ("0.55", "C3", "C1", "C2", "C0", "0.85", "C4", "C5")
"""Of a bar's parts."""
Look = Mapping[str, Any]
"""What matplotlib takes to draw something: color, hatch and the like."""


def new_figure(
    n_columns: int = 1, n_rows: int = 1, *, size: tuple[float, float], sharey: Any = True, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A figure in which nothing overlaps, and its axes ``[n_rows, n_columns]``."""
    figure, axes = plt.subplots(
        n_rows, n_columns, figsize=size, sharey=sharey, squeeze=False, layout="constrained", **options
    )
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write a figure into a file whose suffix names the format; returns the path. The figure is gone then.

    Labels of axes whose scale is not linear name the scale.
    """
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label_text()
            if label and axis.get_scale() != "linear" and "scale" not in label:
                axis.set_label_text(f"{label} ({axis.get_scale()} scale)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def legend(
    figure: Figure, handles: Sequence[Artist], labels: Iterable[str] | None = None, *, columns: int | None = None
) -> None:
    """Put one legend for all axes below them. Labels are by default those of the handles."""
    named = labels if labels is not None else [str(handle.get_label()) for handle in handles]
    figure.legend(list(handles), list(named), loc="outside lower center", ncols=columns or len(handles), frameon=False)


def listed(values: Iterable[object]) -> str:
    """Each value once, in order: "2, 4 and 8". It is for titles, which name everything that is drawn."""
    *most, last = dict.fromkeys(map(str, values))
    return f"{', '.join(most)} and {last}" if most else last


def plain_numbers(*axes: Axis) -> None:
    """Label numbers without exponents, also where the scale is logarithmic."""
    for axis in axes:
        axis.set_major_formatter("{x:g}")


def named_ticks(axis: Axis, ticks: Sequence[float], labels: Sequence[str], **look: Any) -> None:
    """Label these positions and no others, also where the scale is logarithmic."""
    axis.set_ticks(list(ticks), labels=list(labels), **look)
    axis.set_minor_locator(NullLocator())


@dataclass(frozen=True)
class Curve:
    """The curve of one method; `runs` has y of each seed."""

    name: str
    x: Sequence[float]
    runs: Sequence[Sequence[float]]


def curves(
    path: Path, lines: Sequence[Curve], x_label: str, y_label: str, *, log: bool = False, log_x: bool = False
) -> Path:
    """Draw means, and shaded from the least to the greatest of the seeds; returns the path."""
    figure, ((axes,),) = new_figure(size=(6, 4))
    draw_curves(axes, lines)
    axes.set(xlabel=x_label, ylabel=y_label)
    if log:
        axes.set_yscale("log")
    if log_x:
        axes.set_xscale("log")
    axes.legend()
    return save(figure, path)


def panels(
    path: Path,
    grid: Sequence[Sequence[tuple[str, Sequence[Curve]]]],
    x_label: str,
    y_label: str,
    *,
    legends: bool = False,
) -> Path:
    """Draw a grid of titled panels with one legend, or with `legends` one in each; x begins at 0. Returns the path."""
    n_rows, n_columns = len(grid), len(grid[0])
    figure, axes = new_figure(n_columns, n_rows, size=(4 * n_columns, 3 * n_rows + 0.5))
    for row, titled in zip(axes, grid, strict=True):
        for part, (title, lines) in zip(row, titled, strict=True):
            draw_curves(part, lines)
            part.set_title(title, fontsize="medium")
            part.set_xlim(left=0)
            if legends:
                part.legend(fontsize="small")
    for part in axes[-1]:
        part.set_xlabel(x_label)
    figure.supylabel(y_label)
    if not legends:
        legend(figure, axes[0][0].get_lines())
    return save(figure, path)


def draw_curves(axes: Axes, lines: Sequence[Curve]) -> None:
    """Draw means, and shaded from the least to the greatest of the seeds, on a grid."""
    for line in lines:
        values = np.asarray(line.runs, np.float64)
        (drawn,) = axes.plot(line.x, values.mean(axis=0), label=line.name)
        if len(values) > 1:
            axes.fill_between(line.x, values.min(axis=0), values.max(axis=0), color=drawn.get_color(), alpha=0.2)
    axes.grid(alpha=0.3)


@dataclass(frozen=True)
class Bars:
    """A panel of bars that are made of parts.

    By the name of each bar, `parts` has the lengths of its parts in the order of the legend, none if it was not
    measured, and `texts` what stands beside it, by default its length. Bars are cut off at `end`, and the axis says so.
    """

    title: str
    parts: Mapping[str, Sequence[float]]
    texts: Mapping[str, str] | None = None
    end: float = float("inf")


def draw_bars(
    panels: Sequence[Bars], names: Sequence[str], x_label: str, looks: Sequence[Look] | None = None,
    size: tuple[float, float] | None = None, share_x: bool = True, share_y: bool = True, title: str = "",
) -> Figure:  # fmt: skip
    """Draw panels side by side, with one legend for the `names` and `looks` (`COLORS`) of the parts.

    `size` is that of the figure in inches. Panels have one scale with `share_x`, and one list of bars with `share_y`.
    """
    shown = [{"color": color} for color in COLORS] if looks is None else looks
    figure, axes = new_figure(len(panels), size=size or (1.5 + 4 * len(panels), 3.6), sharex=share_x, sharey=share_y)
    for axis, panel in zip(axes[0], panels, strict=True):
        for place, (name, parts) in enumerate(panel.parts.items()):
            ends = np.minimum(np.cumsum([0.0, *parts]), panel.end)  # a bar without parts ends where it begins
            for start, end, look in zip(ends[:-1], ends[1:], shown, strict=False):
                axis.barh(place, end - start, left=start, height=0.7, **look)
            text = f"{ends[-1]:.3g}" if panel.texts is None else panel.texts[name]
            axis.text(ends[-1], place, f" {text}", va="center", fontsize=8)
        axis.set_yticks(range(len(panel.parts)), list(panel.parts))
        axis.set_title(panel.title, fontsize=10)
        cut = any(sum(parts) > panel.end * (1 + 1e-9) for parts in panel.parts.values())
        axis.set_xlabel(f"{x_label} (cut at {panel.end:.3g})" if cut else x_label)
        axis.margins(x=0.17)
        axis.set_ylim(len(panel.parts) - 0.5, -0.5)
    if title:
        figure.suptitle(title)
    legend(figure, [Patch(label=name, **look) for name, look in zip(names, shown, strict=False)])
    return figure
