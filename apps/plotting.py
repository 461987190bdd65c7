"""Figures in one style: their title and notes, names next to lines, ticks with units, curves over seeds, stacked bars.

Titles of figures in the documentation state the finding, computed from the data that is drawn.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.optimize import isotonic_regression

from apps.figure_style import FAINT, SETTINGS, WIDTH_INCHES, looks_of

mpl.use("Agg")  # files are all that is drawn to

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator

mpl.rcParams.update(cast(Any, SETTINGS))

STAGE_COLORS = ("#1b6d5c", "#5fb59d", "#bfe3d8", "#d9d9d9")
"""Encoding, merging and decoding, dark to light, and waiting."""
REST: Mapping[str, Any] = {"facecolor": "white", "edgecolor": "#8c8c8c", "hatch": "////"}
STEP_LOOKS: Sequence[Mapping[str, Any]] = ({"color": "#8c8c8c"}, *({"color": color} for color in STAGE_COLORS), REST)
"""Computing, the stages, and the rest of a step."""
TITLE_CHARACTERS, NOTE_CHARACTERS = 68, 116
PANEL_INCHES = 2.5
DARK = 0.42
"""Lightness that text has at most."""
PALETTE = 256
"""Colours of an image; letters and lines are smoothed with shades of a dozen."""
MOST_END_LABELS = 8


def new_figure(
    n_columns: int = 1, n_rows: int = 1, *, height: float, sharey: Any = True, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """A figure of `WIDTH_INCHES` in which nothing overlaps, and its axes ``[n_rows, n_columns]``."""
    figure, axes = plt.subplots(
        n_rows,
        n_columns,
        figsize=(WIDTH_INCHES, height),
        sharey=sharey,
        squeeze=False,
        layout="constrained",
        **options,
    )
    figure.get_layout_engine().set(h_pad=0.06, w_pad=0.08, hspace=0.04, wspace=0.04)
    return figure, axes


def headline(figure: Figure, title: str, note: str = "") -> None:
    """Write the finding above a figure, and below it the conditions under which it was found."""
    figure.suptitle(_wrapped(title, TITLE_CHARACTERS), x=0.013, ha="left", fontsize=12, fontweight="bold")
    if note:
        text = _wrapped(note, NOTE_CHARACTERS)
        figure.supxlabel(text, x=0.013, ha="left", fontsize=8, color=FAINT, linespacing=1.3)


def _wrapped(text: str, most: int) -> str:
    """Break a text into as few lines as possible, about equally long, and never between a number and its unit."""
    kept = re.sub(r"(?<=\d) (?=[^\s\d])", "\N{NO-BREAK SPACE}", text)
    n_lines = len(textwrap.wrap(kept, most))
    least = next(width for width in range(len(kept) // n_lines, most + 1) if len(textwrap.wrap(kept, width)) <= n_lines)
    return textwrap.fill(kept, least)


def save(figure: Figure, path: Path, dpi: float | None = None) -> Path:
    """Write a figure into a file whose suffix names the format; return the path. The figure is gone then."""
    # labels of axes whose scale is not linear name the scale
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            label = axis.get_label_text()
            if label and axis.get_scale() != "linear" and "scale" not in label:
                axis.set_label_text(f"{label} ({axis.get_scale()} scale)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    if path.suffix == ".png":
        _shrink(path)
    return path


def _shrink(path: Path) -> None:
    """Reduce an image to a palette: a third of the bytes, and no difference that an eye sees."""
    with Image.open(path) as image:
        # The usual method merges the colours of small marks with others.
        reduced = image.convert("RGB").quantize(PALETTE, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def legend(row: Sequence[Axes], handles: Sequence[Artist], *, columns: int | None = None) -> None:
    """Put a legend above a row of axes, below their titles, for series that cannot be named where they are drawn."""
    columns = columns or len(handles)
    made = row[0].legend(
        handles=list(handles), loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.1,
        borderpad=0.2, handlelength=1.6, columnspacing=1.2, fontsize=9,
    )  # fmt: skip
    made.set_in_layout(False)  # it may be wider than its axes; the pad of the titles makes room for its rows
    for axes in row:
        axes.set_title(axes.get_title(loc="left") or " ", pad=8 + 14 * -(-len(handles) // columns))


def name_lines(axes: Axes, *, size: float = 9) -> None:
    """Write the name of each line next to its last point, in its colour; names that would overlap are shifted."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    named = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    points = [(np.asarray(line.get_xydata(), np.float64), line) for line in named]
    figure.draw_without_rendering()  # the layout decides where points lie
    ends = [(float(axes.transData.transform(xy[-1])[1]), xy[-1], line) for xy, line in points if len(xy)]
    ends.sort(key=lambda end: end[0])
    gaps = 1.25 * size / 72 * figure.dpi * np.arange(len(ends))
    # The nearest heights that keep the order and the gaps: heights less gaps must not fall.
    heights = isotonic_regression([height for height, _, _ in ends] - gaps).x + gaps if ends else ()
    for place, (height, (x, y), line) in zip(heights, ends, strict=True):
        axes.annotate(
            str(line.get_label()), (x, y), (7, (place - height) / figure.dpi * 72), textcoords="offset points",
            va="center", fontsize=size, color=readable(line.get_color()), fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def readable(color: Any) -> tuple[float, float, float]:
    """Return a colour for text on white: light ones darker."""
    red, green, blue = to_rgb(color)
    light = 0.21 * red + 0.72 * green + 0.07 * blue
    factor = DARK / max(light, DARK)
    return red * factor, green * factor, blue * factor


def mark_level(axes: Axes, level: float, text: str, *, right: bool = False, above: bool = True) -> None:
    """Draw a horizontal helper line with its meaning written next to it."""
    axes.axhline(level, color=FAINT, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
    axes.annotate(
        text, (float(right), level), (-2 if right else 3, 3 if above else -3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right" if right else "left", va="bottom" if above else "top", fontsize=9,
        color=FAINT,
    )  # fmt: skip


def mark_column(axes: Axes, x: float, text: str) -> None:
    """Draw a vertical helper line with its meaning written at its top."""
    axes.axvline(x, color=FAINT, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
    axes.annotate(
        text, (x, 1.0), (4, -2), xycoords=("data", "axes fraction"), textcoords="offset points", va="top", fontsize=9,
        color=FAINT,
    )  # fmt: skip


def listed(values: Iterable[object]) -> str:
    """Each value once, in order: "2, 4 and 8". It is for titles, which name everything that is drawn."""
    *most, last = dict.fromkeys(map(str, values))
    return f"{', '.join(most)} and {last}" if most else last


def in_units(value: float, unit: str) -> str:
    """A value with a unit and its prefix: 25e6 and "B" are "25 MB", 0.0514 and "s" "51.4 ms"."""
    return EngFormatter(unit)(float(f"{value:.3g}")).replace("\N{MINUS SIGN}", "-")


def unit_ticks(axis: Axis, unit: str, ticks: Sequence[float] | None = None, **look: Any) -> None:
    """Label an axis whose values have the base unit with units that people use: "10 ms", "100 MB", "1 Gbit/s"."""
    if ticks is None:
        axis.set_major_formatter(EngFormatter(unit))
        axis.set_minor_formatter(NullFormatter())
    else:
        named_ticks(axis, ticks, [in_units(tick, unit) for tick in ticks], **look)


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
    path: Path,
    lines: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    log: bool = False,
    log_x: bool = False,
    title: str = "",
    note: str = "",
) -> Path:
    """Draw means, and shaded from the least to the greatest of the seeds; returns the path."""
    figure, ((axes,),) = new_figure(height=3.8)
    if title:
        headline(figure, title, note)
    draw_curves(axes, lines)
    axes.set(xlabel=x_label, ylabel=y_label)
    if log:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis)
    if log_x:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    _name(axes)
    return save(figure, path)


def panels(
    path: Path,
    grid: Sequence[Sequence[tuple[str, Sequence[Curve]]]],
    x_label: str,
    y_label: str,
    *,
    legends: bool = False,
) -> Path:
    """Draw titled panels, two in a row, with one legend, or with `legends` one in each; x begins at 0."""
    titled = [panel for row in grid for panel in row]
    n_columns = min(2, len(titled))
    n_rows = -(-len(titled) // n_columns)
    figure, axes = new_figure(n_columns, n_rows, height=(PANEL_INCHES + 0.4 * legends) * n_rows + 0.6)
    for place, part in enumerate(axes.flat):
        if place >= len(titled):
            part.remove()
            continue
        title, lines = titled[place]
        draw_curves(part, lines)
        part.set_title(title)
        part.set_xlim(left=0)
        part.set_xlabel(x_label)
        if legends:
            part.legend(fontsize=8)
    figure.supylabel(y_label, fontsize=10)
    if not legends:
        lines_drawn = axes[0][0].get_lines()
        legend(axes[0], lines_drawn, columns=min(3, len(lines_drawn)))
    return save(figure, path)


def draw_curves(axes: Axes, lines: Sequence[Curve]) -> None:
    """Draw means, and shaded from the least to the greatest of the seeds."""
    looks = looks_of(line.name for line in lines)
    for line in lines:
        values, look = np.asarray(line.runs, np.float64), looks[line.name]
        axes.plot(line.x, values.mean(axis=0), label=line.name, color=look.color, linestyle=look.linestyle)
        if len(values) > 1:
            axes.fill_between(line.x, values.min(axis=0), values.max(axis=0), color=look.color, alpha=0.15, linewidth=0)


def _name(axes: Axes) -> None:
    if len(axes.get_lines()) > MOST_END_LABELS:
        axes.legend(fontsize=8)
    else:
        name_lines(axes)


@dataclass(frozen=True)
class Bars:
    """A panel of bars that are made of parts."""

    title: str
    # by bar: lengths of its parts in the order of the legend; empty: not measured
    parts: Mapping[str, Sequence[float]]
    texts: Mapping[str, str] | None = None  # next to the bar; None: its length


def draw_bars(
    panels: Sequence[Bars], names: Sequence[str], x_label: str, looks: Sequence[Mapping[str, Any]] | None = None
) -> Figure:
    """Draw panels of bars below each other on one scale, with one legend for the `names` and `looks` of the parts."""
    shown = STEP_LOOKS if looks is None else looks
    rows = [len(panel.parts) for panel in panels]
    height = 0.27 * sum(rows) + 0.45 * len(rows) + 1.5
    figure, axes = new_figure(1, len(panels), height=height, sharex=True, sharey=False, height_ratios=rows)
    for (axis,), panel in zip(axes, panels, strict=True):
        for place, (name, parts) in enumerate(panel.parts.items()):
            ends = np.cumsum([0.0, *parts])  # a bar without parts ends where it begins
            for start, end, look in zip(ends[:-1], ends[1:], shown, strict=False):
                axis.barh(place, end - start, left=start, height=0.72, **look)
            text = f"{ends[-1]:.3g}" if panel.texts is None else panel.texts[name]
            axis.text(ends[-1], place, f" {text}", va="center", fontsize=9)
        axis.set_yticks(range(len(panel.parts)), list(panel.parts))
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.set_title(panel.title)
        axis.margins(x=0.14)
        axis.set_ylim(len(panel.parts) - 0.45, -0.55)
    axes[-1][0].set_xlabel(x_label)
    legend(axes[0], [Patch(label=name, **look) for name, look in zip(names, shown, strict=False)], columns=3)
    return figure
