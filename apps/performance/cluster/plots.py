"""Plots of the records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from apps.performance.cluster.figures import (
    NOTEWORTHY,
    balanced,
    best_mpi,
    crossing,
    payload_rate,
    seconds,
    spared,
    speedup,
)
from apps.performance.cluster.grid import size_text
from apps.performance.cluster.tables import FULL, SHOWN_BYTES, links
from apps.performance.cluster.ways import (
    DENSE_RING,
    GLOO,
    MARSIT_RING,
    MPI_DEFAULT,
    MPICH_DEFAULT,
    ONE_BIT,
    ONE_BIT_RING,
)
from apps.performance.record import scaled
from apps.records import Record

MBIT = 1e6
LINES = (ONE_BIT_RING, MARSIT_RING, DENSE_RING, MPI_DEFAULT, "best MPI", GLOO, MPICH_DEFAULT)
STYLES = {
    ONE_BIT_RING: ("C0", "o", "-"),
    MARSIT_RING: ("C9", "s", "-"),
    DENSE_RING: ("C2", "v", "-"),
    MPI_DEFAULT: ("C3", "^", "--"),
    "best MPI": ("C1", "D", "-"),
    GLOO: ("C4", "P", ":"),
    MPICH_DEFAULT: ("C5", "X", ":"),
}
REST: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.6", "hatch": "////"}
STAGES = (
    ("encode", "seconds_encoding", "C0"),
    ("merge", "seconds_merging", "C2"),
    ("decode", "seconds_decoding", "C1"),
    ("exposed wait", "seconds_waiting", "0.8"),
)
OTHERS: dict[str, Any] = {"marker": "*", "markersize": 12, "markerfacecolor": "none", "linestyle": "none"}
BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8}
COMPUTE = "C7"
CLIPPED, SPACE = 2.5, 1.17  # bars end at so many medians; and what labels need beyond
BARS = (*(f"one-bit {name}" for name in ONE_BIT), MARSIT_RING, "Marsit torus", DENSE_RING)


def draw(records: Sequence[Record], overlaps: Sequence[Record], folder: Path) -> list[Path]:
    """Draw what there are records for.

    Returns
    -------
    list of Path
        Files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    full = [record for record in records if record["settings"]["nodes"] == FULL and _one_level(record)]
    drawn = {
        "cluster-time": time_by_size(full),
        "cluster-speedup": speedup_by_rate(full),
        "cluster-stages": stages(full),
        "cluster-overlap": overlap_by_rate(overlaps),
    }
    return _write(drawn, folder)


def draw_iterations(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the iterations of all methods; records that do not tell of their stages are left out.

    Returns
    -------
    list of Path
        Files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return _write({"cluster-methods": iterations([record for record in records if "compute" in record])}, folder)


def _write(drawn: dict[str, Figure | None], folder: Path) -> list[Path]:
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=130)
            plt.close(figure)
            written.append(folder / f"{name}.png")
    return written


def time_by_size(records: Sequence[Record]) -> Figure | None:
    """Time against size, a panel for each rate."""
    rates = _rates(records)
    if not rates:
        return None
    figure, axes = plt.subplots(
        1, len(rates), figsize=(1.5 + 3.4 * len(rates), 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    lines: dict[str, Any] = {}
    for axis, (rate, cells) in zip(axes[0], rates.items(), strict=True):
        for way in LINES:
            points = [(r["settings"]["bytes"], s * 1e3) for r in cells if (s := _seconds(r, way)) is not None]
            if points:
                color, marker, dashes = STYLES[way]
                drawn = axis.plot(
                    *zip(*points, strict=True),
                    color=color,
                    marker=marker,
                    linestyle=dashes,
                    markersize=4,
                    linewidth=1.2,
                )
                lines.setdefault(way, drawn[0])
        axis.set_title(_rate_title(rate, cells), fontsize=10)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("float32 vector")
        _label_sizes(axis, [record["settings"]["bytes"] for record in records])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("time of an all-reduce, ms")
    labels = ["best of Open MPI" if way == "best MPI" else way for way in lines]
    figure.legend(list(lines.values()), labels, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(f"{FULL} emulated nodes: median of the slowest rank")
    return figure


def speedup_by_rate(records: Sequence[Record]) -> Figure | None:
    """Speed-up over the best MPI against the measured rate, a line for each size; where it passes 1 is marked."""
    by_size: dict[int, list[Record]] = {}
    for record in sorted(records, key=payload_rate):
        by_size.setdefault(record["settings"]["bytes"], []).append(record)
    if not any(len(cells) > 1 for cells in by_size.values()):
        return None
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    colors = plt.get_cmap("viridis")
    handles: dict[str, Any] = {}
    for axis, way in zip(axes, (ONE_BIT_RING, MARSIT_RING), strict=True):
        marked = []
        for number, (nbytes, cells) in enumerate(sorted(by_size.items())):
            points = [(payload_rate(r) / MBIT, ratio) for r in cells if (ratio := speedup(r, way, "best MPI"))]
            if not points:
                continue
            color = colors(number / max(1, len(by_size) - 1) * 0.9)
            (line,) = axis.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=1.2)
            flattered = [
                (payload_rate(r) / MBIT, ratio)
                for r in cells
                if (ratio := speedup(r, way, "best MPI")) and spared(r) > NOTEWORTHY
            ]
            for x, y in flattered:
                axis.plot(x, y, marker="o", color=color, markerfacecolor="white", markersize=5)
            handles.setdefault(size_text(nbytes), line)
            even = crossing(points)
            if even is not None:
                axis.plot([even], [1], marker="*", color=color, markersize=13, markeredgecolor="black", zorder=5)
                marked.append(f"{size_text(nbytes)}: {_rate_text(even)}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(way)
        axis.set_xlabel("payload that a link carries, Mbit/s")
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(alpha=0.3)
        text = "break-even (stars)\n" + "\n".join(marked) if marked else "no break-even in this range"
        axis.text(0.98, 0.97, text, transform=axis.transAxes, ha="right", va="top", fontsize=8, bbox=BOX)
    axes[0].set_ylabel("times faster than the best of Open MPI")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), frameon=False)
    unshaped = [payload_rate(record) / MBIT for record in records if record["settings"]["rate"] == "none"]
    told = f" Unshaped links: {_rate_text(min(unshaped))}." if unshaped else ""
    figure.suptitle(f"{FULL} emulated nodes.{told} Hollow: flattered by the links' token buckets", fontsize=11)
    return figure


def stages(records: Sequence[Record]) -> Figure | None:
    """Where a call's time goes, as parts of it; the time itself stands beside each bar."""
    shown = [record for record in records if record["settings"]["bytes"] == max(SHOWN_BYTES)]
    shown.sort(key=payload_rate)
    if not shown:
        return None
    figure, axes = plt.subplots(
        1, len(shown), figsize=(2.2 + 3.4 * len(shown), 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    names = [name for name in BARS if any(name in record["ways"] for record in shown)]
    for axis, record in zip(axes[0], shown, strict=True):
        for place, name in enumerate(names):
            timed = record["ways"].get(name)
            if timed is None or not timed["cost"]:
                axis.text(2, place, "not measured", va="center", fontsize=7, color="0.5")
                continue
            left = 0.0
            whole = timed["elapsed_s"]
            for _, field, color in STAGES:
                width = 100 * timed["cost"][field] / whole
                axis.barh(place, width, left=left, color=color, height=0.7)
                left += width
            axis.barh(place, max(0.0, 100 - left), left=left, height=0.7, **REST)
            axis.text(103, place, f"{scaled(whole, 1e-3)} ms", va="center", fontsize=8)
        axis.set_xlim(0, 135)
        axis.set_xticks(range(0, 101, 25))
        axis.set_title(_rate_title(links(record["settings"]), [record]), fontsize=10)
        axis.set_xlabel("per cent of the call")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    patches = [mpl.patches.Patch(color=color, label=label) for label, _, color in STAGES]
    patches.append(mpl.patches.Patch(label="MPI, Python, others' turn", **REST))
    figure.legend(handles=patches, loc="outside lower center", ncols=5 if len(shown) > 1 else 3, frameon=False)
    figure.suptitle(f"{FULL} emulated nodes, {size_text(max(SHOWN_BYTES))}: mean over calls and ranks")
    return figure


def iterations(records: Sequence[Record]) -> Figure | None:
    """Time of an iteration, a bar for each method: computing and the all-reduce's stages; a panel for each rate."""
    shown = sorted(records, key=payload_rate, reverse=True)
    if not shown:
        return None
    figure, axes = plt.subplots(
        1, len(shown), figsize=(2 + 5 * len(shown), 5.6), sharey=True, squeeze=False, layout="constrained"
    )
    names = list(shown[0]["rows"])
    looks: list[dict[str, Any]] = [{"color": COMPUTE}, *({"color": color} for _, _, color in STAGES), REST]
    for axis, record in zip(axes[0], shown, strict=True):
        compute_ms = 1e3 * record["compute"]["elapsed_s"]
        wholes = {name: compute_ms + 1e3 * row["elapsed_s"] for name, row in record["rows"].items()}
        end = CLIPPED * median(wholes.values())
        for place, name in enumerate(names):
            parts = [compute_ms, *(1e3 * record["rows"][name]["cost"][field] for _, field, _ in STAGES)]
            parts.append(max(0.0, wholes[name] - sum(parts)))
            left = 0.0
            for width, look in zip(parts, looks, strict=True):
                axis.barh(place, min(width, end - left), left=left, height=0.7, **look)
                left = min(left + width, end)
            longer = "→ " if wholes[name] > end else ""
            axis.text(left + 0.01 * end, place, f"{longer}{scaled(wholes[name], 1)} ms", va="center", fontsize=8)
        axis.set_xlim(0, SPACE * end)
        axis.set_title(_rate_title(links(record["settings"]), [record]), fontsize=10)
        axis.set_xlabel("ms of an iteration")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    labels = ("compute: forward and backward", *(label for label, _, _ in STAGES), "moving bytes, Python")
    patches = [mpl.patches.Patch(label=label, **look) for label, look in zip(labels, looks, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=6 if len(shown) > 1 else 3, frameon=False)
    nodes, n = shown[0]["settings"]["nodes"], shown[0]["n"]
    figure.suptitle(f"{nodes} emulated nodes, {size_text(4 * n)}: mean over calls and ranks; arrows: longer than drawn")
    return figure


def overlap_by_rate(overlaps: Sequence[Record]) -> Figure | None:
    """MessageModel, compute and both against the rate, and the overlap; lines of two nodes, hollow points of more."""
    records = sorted((record for record in overlaps if record["settings"]["nodes"] == 2), key=payload_rate)
    others = [record for record in overlaps if record["settings"]["nodes"] != 2]
    if len(records) < 2:
        return None
    rates = [payload_rate(record) / MBIT for record in records]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, label, color, marker in (
        ("wire", "wire alone", "C0", "o"),
        ("compute", "compute alone", "C1", "s"),
        ("together", "together: the real call", "black", "D"),
    ):
        left.plot(
            rates,
            [1e3 * record[f"{name}_s"] for record in records],
            color=color,
            marker=marker,
            markersize=4,
            label=label,
        )
        for record in others:
            left.plot(payload_rate(record) / MBIT, 1e3 * record[f"{name}_s"], color=color, **OTHERS)
    both = [1e3 * (record["wire_s"] + record["compute_s"]) for record in records]
    left.plot(rates, both, color="0.6", linestyle="--", label="one after the other")
    most = [1e3 * max(record["wire_s"], record["compute_s"]) for record in records]
    left.plot(rates, most, color="0.6", linestyle=":", label="all of the shorter hidden")
    left.set_ylabel("ms")
    left.set_ylim(bottom=0)
    for record in others:
        right.plot(payload_rate(record) / MBIT, 100 * record["overlap"], color="black", **OTHERS)
    if others:
        left.plot([], [], color="black", label=f"{others[0]['settings']['nodes']} nodes", **OTHERS)
    figure.legend(loc="outside lower center", ncols=6, frameon=False)
    right.plot(rates, [100 * record["overlap"] for record in records], color="black", marker="D", markersize=4)
    right.axhline(0, color="0.6", linewidth=0.8)
    right.axhline(100, color="0.6", linewidth=0.8, linestyle=":")
    right.set_ylabel("part of the shorter that is hidden, %")
    found = balanced(records)
    equal = None if found is None else found / MBIT
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel("payload that a link carries, Mbit/s")
        apart = [not at or rate > 1.2 * rates[at - 1] for at, rate in enumerate(rates)]  # labels would overlap
        axis.set_xticks(rates, [f"{rate:.0f}" if shown else "" for rate, shown in zip(rates, apart, strict=True)])
        axis.xaxis.set_minor_locator(NullLocator())
        axis.tick_params(axis="x", labelrotation=45)
        axis.grid(alpha=0.3)
        if equal is not None:
            axis.axvline(equal, color="C3", linewidth=0.8)
    if equal is not None:
        right.set_title(f"wire alone = compute alone at {_rate_text(equal)}", fontsize=10, color="C3")
    n = records[0]["n"]
    stars = f"; stars: {others[0]['settings']['nodes']}" if others else ""
    figure.suptitle(f"one-bit ring, {size_text(4 * n)}, 2 emulated nodes{stars}")
    return figure


def _seconds(record: Record, way: str) -> float | None:
    if way == "best MPI":
        found = best_mpi(record)
        return None if found is None else found[1]
    return seconds(record, way)


def _one_level(record: Record) -> bool:
    return bool(record["settings"]["between"] == "none")


def _rates(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Cells of each rate, slow links first, sizes ascending."""
    found: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda one: (payload_rate(one), one["settings"]["bytes"])):
        found.setdefault(links(record["settings"]), []).append(record)
    return {rate: sorted(cells, key=lambda one: int(one["settings"]["bytes"])) for rate, cells in found.items()}


def _rate_title(rate: str, cells: Sequence[Record]) -> str:
    measured = _rate_text(min(map(payload_rate, cells)) / MBIT)
    return f"{'unshaped' if rate == 'none' else rate}: {measured} of payload"


def _rate_text(mbit: float) -> str:
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"


def _label_sizes(axis: Axes, sizes: Sequence[int]) -> None:
    ticks = sorted(set(sizes))
    axis.set_xticks(ticks, [size_text(nbytes) for nbytes in ticks], rotation=45)
    axis.xaxis.set_minor_locator(NullLocator())
