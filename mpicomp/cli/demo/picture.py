"""Picture of the demo: accuracy against seconds, and how the seconds were spent."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpicomp.cli.demo.report import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
COLORS = {"dense": "#4d4d4d", "Marsit": "#0072b2"}  # as in the figures of the pages
INK, FAINT, PALE = "#222222", "#666666", 0.3


def output_problem(path: Path) -> str:
    """Return why a picture cannot be written to a file, and the cure; empty if it can."""
    if path.suffix.lower() not in SUFFIXES:
        return f"--output {path}: name a file that ends with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    if not path.parent.is_dir():
        return f"--output {path}: there is no folder {path.parent}; make it first, or name another file"
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        return f"--output {path}: {error.strerror}; name a file that you can write"
    if not existed:
        path.unlink()
    return ""


def draw(found: Comparison, path: Path) -> None:
    """Write the picture; ImportError if Matplotlib is not installed."""
    make_figure(found).savefig(path, dpi=150)


def make_figure(found: Comparison) -> Figure:
    """Return the picture: accuracies above, bars of seconds below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.8), layout="constrained")
    curves, bars = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1.1))
    figure.suptitle(found.finding(), x=0.012, ha="left", fontsize=12.5, fontweight="bold", color=INK)
    curves.set_title(found.conditions(), loc="left", fontsize=8.5, color=FAINT)
    _draw_curves(curves, found)
    _draw_bars(bars, found)
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(FAINT)
        axes.tick_params(colors=FAINT)
    return figure


def _draw_curves(axes: Axes, found: Comparison) -> None:
    for name, points in found.trainings.items():
        axes.plot(
            [point.seconds for point in points], [100 * point.accuracy for point in points],
            color=COLORS[name], linewidth=2.5, marker="o", markersize=4,
        )  # fmt: skip
    dense, marsit = found.dense[-1], found.marsit[-1]
    texts = {
        name: f"{name}: {100 * points[-1].accuracy:.1f} % after {points[-1].seconds:.1f} s\n"
        f"{1e-6 * points[-1].bytes_sent:,.0f} MB sent by each rank"
        for name, points in found.trainings.items()
    }
    highest = 100 * max(dense.accuracy, marsit.accuracy)
    axes.text(dense.seconds, 100 * dense.accuracy - 4, texts["dense"], ha="right", va="top",
              color=COLORS["dense"], fontweight="bold")  # fmt: skip
    longest = max(dense.seconds, marsit.seconds)
    is_late = marsit.seconds > 0.6 * longest  # no room on its right
    axes.text(marsit.seconds + 0.02 * longest if not is_late else longest, 0.3 * highest, texts["Marsit"], va="top",
              ha="right" if is_late else "left", color=COLORS["Marsit"], fontweight="bold")  # fmt: skip
    if found.has_gain:
        height = 1.09 * highest
        axes.annotate(
            "", (marsit.seconds, height), (dense.seconds, height), arrowprops={"arrowstyle": "<->", "color": INK}
        )
        axes.text((marsit.seconds + dense.seconds) / 2, height + 0.6, f"{found.factor:.1f} times as fast",
                  ha="center", va="bottom", color=INK, fontweight="bold")  # fmt: skip
    axes.set(xlim=(0, None), ylim=(0, 1.2 * highest))
    axes.set_ylabel("next characters predicted, %", color=FAINT)
    axes.grid(axis="y", alpha=0.25)


def _draw_bars(axes: Axes, found: Comparison) -> None:
    widest = max(points[-1].seconds for points in found.trainings.values())
    for place, (name, points) in enumerate(found.trainings.items()):
        last, color = points[-1], COLORS[name]
        busy = last.seconds - last.seconds_waiting
        axes.barh(place, busy, color=color)
        axes.barh(place, last.seconds_waiting, left=busy, color=color, alpha=PALE)
        text = f"{busy:.1f} s busy, {last.seconds_waiting:.1f} s waiting for messages"
        fits = last.seconds > 0.6 * widest
        axes.text(
            0.99 * last.seconds if fits else last.seconds + 0.01 * widest, place, text,
            ha="right" if fits else "left", va="center", fontsize=9,
            color="white" if fits and busy > last.seconds_waiting else INK,
        )  # fmt: skip
    axes.set_yticks(range(len(found.trainings)), list(found.trainings))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of training", color=FAINT)
