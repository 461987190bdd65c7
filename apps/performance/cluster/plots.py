"""Figures of the all-reduces alone: time by size, speed-up by rate, stages of a call, overlap with computing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from apps.figure_style import FAINT, INK, OTHERS, looks_of
from apps.performance.cluster import ratios
from apps.performance.cluster.implementations import DENSE_RING, GLOO, MARSIT_RING
from apps.performance.cluster.records import cluster_of
from apps.performance.cluster.tables import FULL
from apps.performance.part import STAGES
from apps.plotting import (
    REST,
    STAGE_COLORS,
    Bars,
    draw_bars,
    headline,
    in_units,
    legend,
    listed,
    mark_level,
    name_lines,
    named_ticks,
    new_figure,
    save,
    unit_ticks,
)
from apps.records import Record
from collectives.cost.rate import Rate

BEST_MPI = "Open MPI, best"
SHOWN = {MARSIT_RING: "Marsit", DENSE_RING: "dense", BEST_MPI: BEST_MPI, GLOO: "Gloo"}
"""Implementations whose times are drawn, by their names in records, and their names in figures."""
SPEEDUP_BYTES = (100_000_000, 1_000_000, 64_000)
TITLE_RATE = "1gbit"
STAGES_BYTES = 100_000_000
STAGE_NAMES = ("encode", "merge", "decode", "wait for the link", "everything else")
SIZE_LOOKS = {100_000_000: ("#00456b", "s", "-"), 1_000_000: ("#0072b2", "o", "-"), 64_000: ("#56a8d8", "^", "-")}
"""Shades of Marsit's colour."""
SAME = 0.1
"""Part by which two speed-ups at one rate differ at least if both are written."""
SAME_LINE = 1.15
"""Times of two lines of which one hides the other."""
LIMIT = 32
"""Times fewer bits: one bit an element instead of float32's 32."""
EMULATED = f"{FULL} emulated nodes with one rank each, which share two cores; float32 vectors; medians."


def draw(cells: Sequence[Record], overlaps: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the figures that have records; returns the files written."""
    full = [r for r in cells if r["settings"]["nodes"] == FULL and r["settings"]["between"] == "none"]
    drawn = {
        "cluster-time": time_by_size(full),
        "cluster-speedup": speedup_by_rate(full),
        "cluster-stages": stages(full),
        "cluster-overlap": overlap_by_rate(overlaps),
    }
    return [save(figure, folder / f"{name}.png") for name, figure in drawn.items() if figure is not None]


def speedup_by_rate(cells: Sequence[Record]) -> Figure | None:
    """Speed-up of Marsit over the best dense all-reduce against the rate of the links, for three sizes of vectors."""
    by_rate = _by_rate(cells)
    lines = {
        nbytes: [
            (place, gain, of_size[0]["flattered"])
            for place, of_rate in enumerate(by_rate)
            if (of_size := [record for record in of_rate if record["settings"]["bytes"] == nbytes])
            and (gain := ratios.speedup(of_size[0], MARSIT_RING, ratios.BEST_DENSE)) is not None
        ]
        for nbytes in SPEEDUP_BYTES
    }
    if not any(len(points) > 1 for points in lines.values()):
        return None
    figure, ((axes,),) = new_figure(height=4.3)
    named: list[tuple[int, float]] = []
    for nbytes, points in lines.items():
        if not points:
            continue
        color, marker, dash = SIZE_LOOKS[nbytes]
        places, gains, _ = zip(*points, strict=True)
        axes.plot(places, gains, color=color, linestyle=dash, label=f"{in_units(nbytes, 'B')} vectors")
        for place, gain, hollow in points:
            axes.plot(place, gain, color=color, marker=marker, markerfacecolor="white" if hollow else color)
            if all(abs(gain / other - 1) > SAME for at, other in named if at == place):
                named.append((place, gain))
                first, last = nbytes == SPEEDUP_BYTES[0], place == len(by_rate) - 1
                axes.annotate(
                    _times(gain), (place, gain), (0 if first or last else 5, -13 if first else 5),
                    textcoords="offset points", ha="center" if first or last else "left", fontsize=9,
                )  # fmt: skip
    axes.set(yscale="log", ylim=(0.2, 50), ylabel="times as fast as best dense", xlabel="rate of each node's link")
    named_ticks(axes.yaxis, (0.25, 0.5, 1, 2, 4, 8, 16, 32), ("¼", "½", "1", "2", "4", "8", "16", "32"))
    named_ticks(axes.xaxis, range(len(by_rate)), [rate_text(of_rate[0]) for of_rate in by_rate])
    axes.set_xlim(-0.25, len(by_rate) - 0.75)
    axes.grid(visible=False, axis="x")
    mark_level(axes, LIMIT, f"{LIMIT}× is the limit: 1 bit in place of {LIMIT}", right=True)
    mark_level(axes, 1, "as fast as best dense", above=False)
    name_lines(axes)
    note = (
        f"{EMULATED} Best dense: the fastest of Open MPI's algorithms, Gloo and mpicomp's ring at each point. Without "
        "full-precision rounds. Hollow: an emulated link lets a first burst through at once; a real link does not."
    )
    headline(figure, speedup_title(cells), note)
    return figure


def speedup_title(cells: Sequence[Record]) -> str:
    """The finding: the speed-up of the longest of `SPEEDUP_BYTES` at `TITLE_RATE`, or at the slowest rate there is."""
    ordered = sorted(cells, key=lambda one: (one["settings"]["rate"] != TITLE_RATE, -one["settings"]["bytes"]))
    found = next(record for record in ordered if record["settings"]["bytes"] in SPEEDUP_BYTES)
    gain = ratios.speedup(found, MARSIT_RING, ratios.BEST_DENSE) or 0.0
    size, rate = in_units(found["settings"]["bytes"], "B"), rate_text(found)
    return f"Marsit's all-reduce of {size} is {_times(gain).rstrip('×')} times as fast as the best dense one at {rate}"


def time_by_size(cells: Sequence[Record]) -> Figure | None:
    """Time against size, a panel for each rate."""
    by_rate = _by_rate(cells)
    if not by_rate:
        return None
    looks = looks_of(SHOWN.values())
    n_rows = -(-len(by_rate) // 2)
    figure, axes = new_figure(2, n_rows, height=2.6 * n_rows + 1.1, sharex=True)
    for axis, of_rate in zip(axes.flat, by_rate, strict=False):
        for name, shown in SHOWN.items():
            points = [(r["settings"]["bytes"], s) for r in of_rate if (s := seconds(r, name)) is not None]
            look = looks[shown]
            axis.plot(*zip(*points, strict=True), **look._asdict(), markersize=4, label=shown) if points else None
        axis.set(xscale="log", yscale="log")
        axis.set_title(rate_text(of_rate[0]))
        sizes = sorted({record["settings"]["bytes"] for record in cells})
        named_ticks(
            axis.xaxis,
            sizes,
            [in_units(nbytes, "B") for nbytes in sizes],
            rotation=40,
            ha="right",
            rotation_mode="anchor",
            fontsize=8.5,
        )
        unit_ticks(axis.yaxis, "s")
    for axis in axes.flat[len(by_rate) :]:
        axis.remove()
    legend(axes[0], axes[0][0].get_lines())
    figure.supylabel("time of an all-reduce (log scale)", fontsize=10)
    note = "Open MPI: the fastest of its algorithms at each point. Dense: mpicomp's all-reduce without compression."
    headline(figure, time_title(by_rate), f"{EMULATED} {note}{name_coinciding(by_rate)}")
    return figure


def name_coinciding(by_rate: Sequence[Sequence[Record]]) -> str:
    """Return the sentence that names the lines that lie on each other, from a size on; empty if they do nowhere."""
    others = {name: shown for name, shown in SHOWN.items() if name != MARSIT_RING}
    found: dict[int, list[str]] = {}
    for of_rate in by_rate:
        together = []
        for record in sorted(of_rate, key=lambda one: -one["settings"]["bytes"]):
            timed = [one for name in others if (one := seconds(record, name)) is not None]
            if len(timed) == len(others):
                if max(timed) > SAME_LINE * min(timed):
                    break
                together.append(record["settings"]["bytes"])
        if len(together) > 1:
            found.setdefault(together[-1], []).append(rate_text(of_rate[0]))
    where = [f"from {in_units(nbytes, 'B')} on at {listed(rates)}" for nbytes, rates in found.items()]
    names = listed(shown.partition(",")[0] for shown in others.values())
    return f" The lines of {names} coincide {listed(where)}." if where else ""


def time_title(by_rate: Sequence[Sequence[Record]]) -> str:
    """The finding: the size from which Marsit is faster than all others at every rate."""
    won: dict[int, bool] = {}
    for record in (record for of_rate in by_rate for record in of_rate):
        ours = seconds(record, MARSIT_RING)
        others = [one for name in SHOWN if name != MARSIT_RING and (one := seconds(record, name)) is not None]
        if ours is not None and others:
            nbytes = record["settings"]["bytes"]
            won[nbytes] = won.get(nbytes, True) and ours < min(others)
    lost = [nbytes for nbytes, always in won.items() if not always]
    above = [nbytes for nbytes in won if nbytes > max(lost, default=0)]
    if not above:
        return "Marsit's all-reduce is the fastest at some rates only"
    return f"From {in_units(min(above), 'B')} on, Marsit's all-reduce is the fastest at every rate"


def stages(cells: Sequence[Record]) -> Figure | None:
    """Parts of a call of Marsit and of dense at each rate; the time itself stands next to each bar."""
    shown = [record for record in _slow_first(cells) if record["settings"]["bytes"] == STAGES_BYTES]
    shown = [record for record in shown if _select_timed(record, MARSIT_RING)]
    if not shown:
        return None
    panels = []
    for name in (MARSIT_RING, DENSE_RING):
        timed = {rate_text(record): found for record in shown if (found := _select_timed(record, name))}
        if timed:
            panels.append(
                Bars(
                    SHOWN[name] if name != DENSE_RING else "Dense: mpicomp's all-reduce without compression",
                    {rate: [100 * part for part in shares(one)] for rate, one in timed.items()},
                    {rate: in_units(one["elapsed_s"], "s") for rate, one in timed.items()},
                )
            )
    figure = draw_bars(panels, STAGE_NAMES, "per cent of the call", [*({"color": c} for c in STAGE_COLORS), REST])
    waiting = [
        100 * shares(_select_timed(record, MARSIT_RING))[list(STAGES).index("wait")] for record in (shown[0], shown[-1])
    ]
    title = f"Marsit waits for the link {waiting[0]:.0f} % of a call at {rate_text(shown[0])}"
    if len(shown) > 1:
        last = "without a limit" if shown[-1]["settings"]["rate"] == "none" else f"at {rate_text(shown[-1])}"
        title += f", {waiting[1]:.0f} % {last}"
    what = f"{in_units(STAGES_BYTES, 'B')}; means over calls and ranks. Beside each bar: the time of a call. "
    what += "Everything else: moving bytes, Python, and the rank that shares the core."
    headline(figure, title, EMULATED.replace("medians.", what))
    return figure


def overlap_by_rate(overlaps: Sequence[Record]) -> Figure | None:
    """Sending, computing and both at once against the rate, on two nodes."""
    records = sorted((one for one in overlaps if one["settings"]["nodes"] == 2), key=ratios.payload_rate)
    if len(records) < 2:
        return None
    rates = [ratios.payload_rate(record) for record in records]
    figure, ((axes,),) = new_figure(height=4.0)
    one_after = [record["wire_s"] + record["compute_s"] for record in records]
    for label, times, color, marker, dash in (
        ("one after the other", one_after, FAINT, "", (0, (2, 2))),
        ("sending alone", [record["wire_s"] for record in records], OTHERS[1], "^", "-"),
        ("computing alone", [record["compute_s"] for record in records], STAGE_COLORS[0], "o", "-"),
        ("the real call", [record["both_s"] for record in records], INK, "s", "-"),
    ):
        axes.plot(rates, times, color=color, marker=marker, linestyle=dash, label=label)
    axes.set(xscale="log", ylabel="time of a call", xlabel="rate that a link carried", ylim=(0, 1.08 * max(one_after)))
    unit_ticks(axes.yaxis, "s")
    ticks = [rate for rate in (5e8, 1e9, 2e9, 4e9, 8e9, 3.5e10) if rates[0] < 1.2 * rate]
    unit_ticks(axes.xaxis, "bit/s", ticks, fontsize=8.5)
    name_lines(axes)
    sizes = {in_units(4 * record["n"], "B") for record in records}
    note = (
        f"One-bit all-reduce of {', '.join(sorted(sizes))} on 2 emulated nodes with a core each; medians over five "
        "jobs. Sending alone: the same messages without their computing."
    )
    headline(figure, overlap_title(records), note)
    return figure


def overlap_title(records: Sequence[Record]) -> str:
    """The finding: the part of computing or sending that is hidden on the slowest and the fastest limited links."""
    best = max(records, key=lambda record: float(record["overlap"]))
    worst = min((r for r in records if r["settings"]["rate"] != "none"), key=lambda r: float(r["overlap"]))
    return (
        f"A call hides {100 * best['overlap']:.0f} % of its computing behind sending at {rate_text(best)}, "
        f"{100 * worst['overlap']:.0f} % of its sending behind computing at {rate_text(worst)}"
    )


def seconds(record: Record, name: str) -> float | None:
    """Median of an implementation, or of the fastest of Open MPI; None where it was not measured."""
    if name != BEST_MPI:
        return ratios.seconds(record, name)
    found = ratios.best_mpi(record)
    return None if found is None else found[1]


def shares(timed: dict[str, Any]) -> list[float]:
    """Return the part of a call that each of `STAGES` takes, and the rest."""
    parts = [timed["cost"][field] / timed["elapsed_s"] for field in STAGES.values()]
    return [*parts, max(0.0, 1 - sum(parts))]


def rate_text(record: Record) -> str:
    """The rate of the links as they were set, or as measured where they had no limit."""
    bits_per_s = cluster_of(record).bits_per_s
    if bits_per_s is not None:
        return str(Rate(bits_per_s))
    return f"no limit ({in_units(float(f'{ratios.payload_rate(record):.2g}'), 'bit/s')})"


def _times(gain: float) -> str:
    return f"{gain:.0f}×" if gain >= 9.95 else f"{gain:.1f}×" if gain >= 0.95 else f"{gain:.2f}×"


def _select_timed(record: Record, name: str) -> dict[str, Any]:
    found = record["timings"].get(name) or {}
    return found if found.get("cost") else {}


def _slow_first(cells: Sequence[Record]) -> list[Record]:
    return sorted(cells, key=lambda one: (cluster_of(one).bits_per_s or float("inf"), one["settings"]["bytes"]))


def _by_rate(cells: Sequence[Record]) -> list[list[Record]]:
    """Cells of each rate, slow links first, sizes ascending."""
    found: dict[str, list[Record]] = {}
    for record in _slow_first(cells):
        found.setdefault(cluster_of(record).links, []).append(record)
    return list(found.values())
