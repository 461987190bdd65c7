"""Figures of the page: losses above float32's in all experiments, seconds to float32's loss, sizes of activations.

The data of the first two are the numbers of the page's table, as it prints them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from apps.figure_style import FAINT, looks_of
from apps.plotting import Curve, curves, headline, named_ticks, new_figure, save
from apps.records import Record

OURS, DIRECT = "AQ-SGD", "DirectQ"
PRETRAINED = "pretrained"
Interval = tuple[float, float]
"""A difference, and half of its interval at 95 %; 0: not stated."""


def draw(found: Record, folder: Path) -> list[Path]:
    """Draw all figures; returns their paths."""
    drawn = {"reproduce-aq-sgd": gaps(found["gaps"]), "reproduce-aq-sgd-against-time": seconds(found["seconds"])}
    paths = [save(figure, folder / f"{name}.png") for name, figure in drawn.items()]
    return [*paths, magnitudes(found["magnitudes"], folder / "reproduce-aq-sgd-magnitudes.png")]


def printed(text: str | Sequence[str]) -> Interval:
    """Read a difference as the table prints it, or the difference of two printed losses."""
    if not isinstance(text, str):
        first, second = map(float, text)
        return first - second, 0.0
    value, _, half = text.partition(" ± ")
    return float(value), float(half or 0)


def gaps(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Last losses above float32's of AQ-SGD and DirectQ, a row for each experiment."""
    looks = looks_of((OURS, DIRECT))
    figure, ((axes,),) = new_figure(height=0.36 * len(rows) + 2.1)
    for place, row in enumerate(rows):
        for name, shift in ((DIRECT, -0.16), (OURS, 0.16)):
            value, half = printed(row[name])
            look = looks[name]
            axes.errorbar(
                value, place + shift, xerr=half or None, color=look.color, marker=look.marker, linestyle="", capsize=3,
                label=name if place == 0 else None,
            )  # fmt: skip
    axes.axvline(0, color=FAINT, linewidth=1.0, linestyle=(0, (6, 3)), zorder=1)
    named_ticks(axes.yaxis, range(len(rows)), [row["name"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="last loss above float32's on held-out data, nats")
    axes.legend(loc="lower right")
    note = (
        "Means over 3 seeds, and intervals at 95 % where the table states them. Bits: of activations forward and of "
        "gradients backward."
    )
    headline(figure, gaps_title(rows), note)
    return figure


def gaps_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """The finding: how far both end above float32, from pretrained and from random weights."""
    ours, direct = (
        {
            pretrained: max(printed(row[name])[0] for row in rows if row[PRETRAINED] == pretrained)
            for pretrained in (True, False)
        }
        for name in (OURS, DIRECT)
    )
    return (
        f"Fine-tuning by AQ-SGD ends at most {ours[True]:.2f} nats above float32, by DirectQ up to {direct[True]:.2f}; "
        f"from random weights {ours[False]:.2f} and {direct[False]:.2f}"
    )


def seconds(found: Mapping[str, Any]) -> Figure:
    """Seconds until float32's last loss is reached."""
    times: Mapping[str, float | None] = found["to_loss_s"]
    looks = looks_of(times)
    figure, ((axes,),) = new_figure(height=2.4)
    for place, (name, time) in enumerate(times.items()):
        axes.barh(place, time or 0, height=0.7, color=looks[name].color)
        text = f"{'not reached' if time is None else f'{time:.3g} s'}; {found['step_ms'][name]:.0f} ms a step"
        axes.annotate(text, (time or 0, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    named_ticks(axes.yaxis, range(len(times)), list(times))
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.3)
    axes.set(ylim=(len(times) - 0.45, -0.55), xlabel="training seconds to float32's last loss")
    note = (
        "Links of 100 Mbit/s, a model of 8 blocks in 4 stages, 2 bits forward and 4 backward; seconds of a step by the "
        "simulator of schedules; reached: within 0.02 nats."
    )
    headline(figure, seconds_title(times), note)
    return figure


def seconds_title(times: Mapping[str, float | None]) -> str:
    """The finding: how many times as fast AQ-SGD reaches float32's loss."""
    exact, ours = times["float32"], times[OURS]
    assert exact is not None
    if ours is None:
        return "AQ-SGD does not reach float32's loss at 100 Mbit/s"
    end = "; DirectQ does not reach it" if times[DIRECT] is None else ""
    return f"AQ-SGD reaches float32's loss {exact / ours:.2f} times as fast at 100 Mbit/s{end}"


def magnitudes(found: Mapping[str, Sequence[Sequence[float | None]]], path: Path) -> Path:
    """Draw the mean size of activations and of their change since the last visit, by seed; returns the path."""
    sizes, changes = (np.array(found[key], np.float64) for key in ("activations", "changes"))  # None becomes NaN
    steps = range(sizes.shape[1])
    lines = [Curve("activations", steps, sizes.tolist()), Curve("their change", steps, changes.tolist())]
    first, last = parts_that_change(sizes, changes)
    title = (
        f"Between visits, activations change by {100 * first:.0f} % of their size in the second epoch, "
        f"by {100 * last:.1f} % at the end"
    )
    note = (
        f"Mean size of an element at the first cut in float32, {len(sizes)} seeds: means, and shaded from the least to "
        "the greatest. Change: since the last visit of the same example, an epoch before."
    )
    return curves(path, lines, "step", "mean size of an element", log=True, title=title, note=note)


def parts_that_change(sizes: NDArray[np.float64], changes: NDArray[np.float64]) -> tuple[float, float]:
    """Changes over activations in a tenth of the steps: from the second epoch on, and at the end."""
    tenth = sizes.shape[1] // 10
    second_epoch = int(np.isfinite(changes).all(axis=0).argmax())  # in the first one no example has a last visit
    early = slice(second_epoch, second_epoch + tenth)
    first, last = (float(changes[:, part].mean() / sizes[:, part].mean()) for part in (early, slice(-tenth, None)))
    return first, last
