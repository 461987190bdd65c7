"""Plots of the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apps.performance.cluster import ratios
from apps.performance.cluster.backward import over_communication
from apps.performance.cluster.grid import size_text
from apps.performance.cluster.implementations import (
    DENSE_RING,
    GLOO,
    MARSIT_RING,
    MPI_DEFAULT,
    MPICH_DEFAULT,
    ONE_BIT,
    ONE_BIT_RING,
)
from apps.performance.cluster.records import cluster_of
from apps.performance.cluster.tables import FULL, SHOWN_BYTES
from apps.performance.part import STAGES, scaled
from apps.plotting import Bars, draw_bars, legend, listed, named_ticks, new_figure, plain_numbers, save
from apps.records import Record

MBIT = 1e6
BEST_MPI = "best of Open MPI"
STYLES = {
    ONE_BIT_RING: ("C0", "o", "-"),
    MARSIT_RING: ("C9", "s", "-"),
    DENSE_RING: ("C2", "v", "-"),
    MPI_DEFAULT: ("C3", "^", "--"),
    BEST_MPI: ("C1", "D", "-"),
    GLOO: ("C4", "P", ":"),
    MPICH_DEFAULT: ("C5", "X", ":"),
}
REST: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////"}
STAGE_LOOKS = [{"color": color} for color in ("C0", "C2", "C1", "0.8")]
OTHERS: dict[str, Any] = {"marker": "*", "markersize": 12, "markerfacecolor": "none", "linestyle": "none"}
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
CLIPPED = 2.5  # bars end at so many medians
BARS = (*(f"one-bit {name}" for name in ONE_BIT), MARSIT_RING, "Marsit torus", DENSE_RING)


def draw(records: Sequence[Record], overlaps: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the plots that have records; returns the files written."""
    full = [r for r in records if r["settings"]["nodes"] == FULL and r["settings"]["between"] == "none"]
    drawn = {
        "cluster-time": time_by_size(full),
        "cluster-speedup": speedup_by_rate(full),
        "cluster-stages": stages(full),
        "cluster-overlap": overlap_by_rate(overlaps),
    }
    return [save(figure, folder / f"{name}.png") for name, figure in drawn.items() if figure is not None]


def draw_iterations(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the iterations of all methods; returns the files written."""
    return [save(iterations(records), folder / "cluster-methods.png")] if records else []


def draw_backward(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the exposed communication next to backward; returns the files written."""
    return [save(exposed(records), folder / "cluster-backward.png")] if records else []


def exposed(records: Sequence[Record]) -> Figure:
    """Backward and communication one after the other and at once, a panel for each method and rate."""
    panels = []
    for record in sorted(records, key=ratios.payload_rate, reverse=True):
        for method in dict.fromkeys(row["method"] for row in record["rows"]):
            parts: dict[str, list[float]] = {}
            texts: dict[str, str] = {}
            for row in record["rows"]:
                if row["method"] == method:
                    alone, sending, both, waits = (
                        1e3 * row[f"{name}_s"] for name in ("backward", "communication", "both", "exposed")
                    )
                    apart, overlapped = (f"{over_communication(row):.2f}×, {how}" for how in ("apart", "overlapped"))
                    parts[apart], texts[apart] = [alone, 0.0, sending], scaled(alone + sending, 1)
                    parts[overlapped] = [alone, max(0.0, both - alone - waits), waits]
                    # Medians of parts need not add up to the median of the step. The text states the latter.
                    texts[overlapped] = scaled(both, 1)
            panels.append(Bars(f"{method}, {_rate_title([record])}", parts, texts))
    return draw_bars(
        panels,
        ("backward alone", "copies, and backward while it shares its core", "communication that the rank waits for"),
        "ms",
        [{"color": "C7"}, {"color": "C1"}, {"color": "C0"}],
        (2 + 4.6 * len(panels), 3.6),
        share_x=False,
        share_y=False,
        title="Backward of so many times its communication, as measured: median of the slowest rank",
    )


def time_by_size(records: Sequence[Record]) -> Figure | None:
    """Time against size, a panel for each rate."""
    rates = _by_rate(records)
    if not rates:
        return None
    figure, (axes,) = new_figure(len(rates), size=(1.5 + 3.4 * len(rates), 4.4))
    lines: dict[str, Any] = {}
    for axis, cells in zip(axes, rates, strict=True):
        for name, (color, marker, dashes) in STYLES.items():
            points = [(r["settings"]["bytes"], 1e3 * s) for r in cells if (s := _seconds(r, name)) is not None]
            if points:
                look = {"color": color, "marker": marker, "linestyle": dashes, "markersize": 4, "linewidth": 1.2}
                lines.setdefault(name, axis.plot(*zip(*points, strict=True), **look)[0])
        axis.set(xscale="log", yscale="log", xlabel="float32 vector")
        axis.set_title(_rate_title(cells), fontsize=10)
        sizes = sorted({record["settings"]["bytes"] for record in records})
        named_ticks(axis.xaxis, sizes, [size_text(nbytes) for nbytes in sizes], rotation=45)
        plain_numbers(axis.yaxis)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time of an all-reduce, ms")
    legend(figure, list(lines.values()), list(lines))
    figure.suptitle(f"{FULL} emulated nodes: median of the slowest rank")
    return figure


def speedup_by_rate(records: Sequence[Record]) -> Figure | None:
    """Speed-up over the best MPI against the measured rate, a line for each size; where it passes 1 is marked."""
    by_size: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda one: (one["settings"]["bytes"], ratios.payload_rate(one))):
        by_size.setdefault(record["settings"]["bytes"], []).append(record)
    if not any(len(cells) > 1 for cells in by_size.values()):
        return None
    figure, (axes,) = new_figure(2, size=(11, 4.4))
    colors = colormaps["viridis"]
    handles: dict[str, Any] = {}
    for axis, name in zip(axes, (ONE_BIT_RING, MARSIT_RING), strict=True):
        marked = []
        for number, (nbytes, cells) in enumerate(by_size.items()):
            gained = [record for record in cells if ratios.speedup(record, name, "best MPI")]
            points = [(ratios.payload_rate(r) / MBIT, ratios.speedup(r, name, "best MPI") or 0.0) for r in gained]
            if not points:
                continue
            color = colors(number / max(1, len(by_size) - 1) * 0.9)
            (line,) = axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=1.2)
            handles.setdefault(size_text(nbytes), line)
            for record, point in zip(gained, points, strict=True):
                if ratios.bucket_share(record) > ratios.NOTEWORTHY:
                    axis.plot(*point, marker="o", color=color, markerfacecolor="white", markersize=5)
            even = ratios.crossing(points)
            if even is not None:
                axis.plot([even], [1], marker="*", color=color, markersize=13, markeredgecolor="black", zorder=5)
                marked.append(f"{size_text(nbytes)}: {_rate_text(even)}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=name, xlabel="payload that a link carries, Mbit/s")
        plain_numbers(axis.xaxis, axis.yaxis)
        axis.yaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
        text = "break-even (stars)\n" + "\n".join(marked) if marked else "no break-even in this range"
        axis.text(0.98, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=8, bbox=BOX)
    axes[0].set_ylabel("times faster than the best of Open MPI")
    legend(figure, list(handles.values()), list(handles))
    unshaped = [ratios.payload_rate(record) / MBIT for record in records if record["settings"]["rate"] == "none"]
    told = f" Unshaped links: {_rate_text(min(unshaped))}." if unshaped else ""
    figure.suptitle(f"{FULL} emulated nodes.{told} Hollow: flattered by the links' token buckets", fontsize=11)
    return figure


def stages(records: Sequence[Record]) -> Figure | None:
    """Draw where a call's time goes, as parts of it; the time itself stands next to each bar."""
    shown = [record for record in records if record["settings"]["bytes"] == max(SHOWN_BYTES)]
    if not shown:
        return None
    names = [name for name in BARS if any(name in record["timings"] for record in shown)]
    panels = []
    for record in sorted(shown, key=ratios.payload_rate):
        parts: dict[str, Sequence[float]] = {}
        texts = {}
        for name in names:
            timed = record["timings"].get(name)
            measured = timed is not None and timed["cost"]
            parts[name] = [100 * part for part in _shares(timed)] if measured else ()
            texts[name] = f"{scaled(timed['elapsed_s'], 1e-3)} ms" if measured else "not measured"
        panels.append(Bars(_rate_title([record]), parts, texts, 100.0))
    return draw_bars(
        panels,
        (*STAGES, "MPI, Python, others' turn"),
        "per cent of the call",
        [*STAGE_LOOKS, REST],
        (2.2 + 3.4 * len(shown), 4.4),
        title=f"{FULL} emulated nodes, {size_text(max(SHOWN_BYTES))}: mean over calls and ranks",
    )


def iterations(records: Sequence[Record]) -> Figure:
    """Time of an iteration, a bar for each method: computing and the all-reduce's stages; a panel for each rate."""
    panels = []
    for record in sorted(records, key=ratios.payload_rate, reverse=True):
        compute_ms = 1e3 * record["compute"]["elapsed_s"]
        wholes = {name: compute_ms + 1e3 * row["elapsed_s"] for name, row in record["rows"].items()}
        end = CLIPPED * median(wholes.values())
        parts = {
            name: [compute_ms, *(1e3 * row["elapsed_s"] * part for part in _shares(row))]
            for name, row in record["rows"].items()
        }
        texts = {name: f"{'→ ' if whole > end else ''}{scaled(whole, 1)} ms" for name, whole in wholes.items()}
        panels.append(Bars(_rate_title([record]), parts, texts, end))
    return draw_bars(
        panels,
        ("compute: forward and backward", *STAGES, "moving bytes, Python"),
        "ms of an iteration",
        [{"color": "C7"}, *STAGE_LOOKS, REST],
        (2 + 5 * len(panels), 5.6),
        share_x=False,
        title=f"{listed(record['settings']['nodes'] for record in records)} emulated nodes, "
        f"{listed(size_text(4 * record['n']) for record in records)}: "
        "mean over calls and ranks; arrows: longer than drawn",
    )


def overlap_by_rate(overlaps: Sequence[Record]) -> Figure | None:
    """Draw wire, compute and both against the rate, and the overlap; lines of two nodes, hollow points of more."""
    records = sorted((record for record in overlaps if record["settings"]["nodes"] == 2), key=ratios.payload_rate)
    others = [record for record in overlaps if record["settings"]["nodes"] != 2]
    if len(records) < 2:
        return None
    rates = [ratios.payload_rate(record) / MBIT for record in records]
    figure, ((left, right),) = new_figure(2, size=(11, 4), sharey=False)
    for name, label, color, marker in (
        ("wire_s", "wire alone", "C0", "o"),
        ("compute_s", "compute alone", "C1", "s"),
        ("both_s", "both: the real call", "black", "D"),
    ):
        times = [1e3 * record[name] for record in records]
        left.plot(rates, times, color=color, marker=marker, markersize=4, label=label)
        for record in others:
            left.plot(ratios.payload_rate(record) / MBIT, 1e3 * record[name], color=color, **OTHERS)
    for made_of, style, label in (
        (sum, "--", "one after the other"),
        (max, ":", "all of the shorter hidden"),
    ):
        times = [1e3 * made_of((r["wire_s"], r["compute_s"])) for r in records]
        left.plot(rates, times, color="0.6", linestyle=style, label=label)
    left.set_ylabel("ms")
    left.set_ylim(bottom=0)
    right.plot(rates, [100 * record["overlap"] for record in records], color="black", marker="D", markersize=4)
    for record in others:
        right.plot(ratios.payload_rate(record) / MBIT, 100 * record["overlap"], color="black", **OTHERS)
    more = listed(record["settings"]["nodes"] for record in others)
    if others:
        left.plot([], [], color="black", label=f"{more} nodes", **OTHERS)
    legend(figure, *left.get_legend_handles_labels(), columns=6)
    right.axhline(0, color="0.6", linewidth=0.8)
    right.axhline(100, color="0.6", linewidth=0.8, linestyle=":")
    right.set_ylabel("part of the shorter that is hidden, %")
    found = ratios.balanced(records)
    for axis in (left, right):
        _rates_below(axis, rates)
        if found is not None:
            axis.axvline(found / MBIT, color="C3", linewidth=0.8)
    if found is not None:
        right.set_title(f"wire alone = compute alone at {_rate_text(found / MBIT)}", fontsize=10, color="C3")
    stars = f"; stars: {more}" if others else ""
    sizes = listed(size_text(4 * record["n"]) for record in (*records, *others))
    figure.suptitle(f"one-bit ring, {sizes}, 2 emulated nodes{stars}")
    return figure


def _rates_below(axis: Axes, rates: Sequence[float]) -> None:
    apart = [not at or rate > 1.2 * rates[at - 1] for at, rate in enumerate(rates)]  # labels would overlap
    axis.set(xscale="log", xlabel="payload that a link carries, Mbit/s")
    labels = [f"{rate:.0f}" if shown else "" for rate, shown in zip(rates, apart, strict=True)]
    named_ticks(axis.xaxis, rates, labels, rotation=45)
    axis.grid(alpha=0.3)


def _shares(timed: dict[str, Any]) -> list[float]:
    """Return the part of a call that each of `STAGES` takes, and the rest."""
    parts = [timed["cost"][field] / timed["elapsed_s"] for field in STAGES.values()]
    return [*parts, max(0.0, 1 - sum(parts))]


def _seconds(record: Record, name: str) -> float | None:
    if name != BEST_MPI:
        return ratios.seconds(record, name)
    found = ratios.best_mpi(record)
    return None if found is None else found[1]


def _by_rate(records: Sequence[Record]) -> list[list[Record]]:
    """Cells of each rate, slow links first, sizes ascending."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=ratios.payload_rate):
        found.setdefault(cluster_of(record).links, []).append(record)
    return [sorted(cells, key=lambda one: int(one["settings"]["bytes"])) for cells in found.values()]


def _rate_title(cells: Sequence[Record]) -> str:
    rate, measured = cluster_of(cells[0]).links, min(map(ratios.payload_rate, cells)) / MBIT
    return f"{'unshaped' if rate == 'none' else rate}: {_rate_text(measured)} of payload"


def _rate_text(mbit: float) -> str:
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"
