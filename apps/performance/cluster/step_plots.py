"""Figures of whole methods on the cluster: their all-reduce, communication during backward, and training to a goal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from apps.figure_style import FAINT, OTHERS, PALE, known_look, looks_of
from apps.performance.cluster.backward import over_communication
from apps.performance.cluster.plots import rate_text
from apps.plotting import headline, in_units, mark_column, named_ticks, new_figure, save, unit_ticks
from apps.records import Record

LENGTHS = ("short", "medium", "long")
"""Backward passes of a method, by their duration."""


def draw_steps(
    methods: Sequence[Record], backward: Sequence[Record], training: Sequence[Record], folder: Path
) -> list[Path]:
    """Draw the figures that have records; returns the files written."""
    drawn = {
        "cluster-methods": calls(methods) if methods else None,
        "cluster-backward": saved_by_overlap(backward) if backward else None,
        "cluster-training": seconds_to_goal(training) if training else None,
    }
    return [save(figure, folder / f"{name}.png") for name, figure in drawn.items() if figure is not None]


def calls(records: Sequence[Record]) -> Figure:
    """Time of the all-reduce of each method: a filled mark for the fastest links, a hollow one for slower links."""
    ordered = _fast_first(records)
    names = sorted(ordered[0]["rows"], key=lambda name: float(ordered[0]["rows"][name]["median_s"]))
    figure, ((axes,),) = new_figure(height=0.26 * len(names) + 1.7)
    for place, name in enumerate(names):
        look = known_look(name)
        color, marker = (look.color, look.marker) if look else (OTHERS[0], "o")
        times = [record["rows"][name]["median_s"] for record in ordered if name in record["rows"]]
        axes.plot(times, [place] * len(times), color=PALE, linewidth=3, zorder=1)
        for number, time in enumerate(times):
            axes.plot(time, place, color=color, marker=marker, markerfacecolor="white" if number else color)
        shown = [in_units(time, "s") for time in times]
        axes.annotate(
            " · ".join(shown), (max(times), place), (8, 0), textcoords="offset points", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    axes.set(xscale="log", xlabel="time of the all-reduce", ylim=(len(names) - 0.4, -0.9))
    named_ticks(axes.yaxis, range(len(names)), names)
    unit_ticks(axes.xaxis, "s")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(right=3.2 * axes.get_xlim()[1])
    mark_column(axes, float(ordered[0]["compute"]["median_s"]), "forward and backward")
    rates = [rate_text(record) for record in ordered]
    marks = f"Filled marks: {rates[0]}" + "".join(f"; hollow: {rate}" for rate in rates[1:])
    compute = ordered[0]["compute"]
    nodes, parameters = ordered[0]["settings"]["nodes"], ordered[0]["n"] / 1e6
    note = (
        f"{marks}. {nodes} emulated nodes, {parameters:g} million elements; medians. Forward and backward: of an MLP "
        f"of as many parameters, {compute['batch']} images a rank; nothing overlaps with it."
    )
    headline(figure, calls_title(ordered), note)
    return figure


def calls_title(ordered: Sequence[Record]) -> str:
    """The finding: how many times as fast as dense Marsit's all-reduce is."""
    found: list[str] = []
    for record in ordered:
        rows = record["rows"]
        if "Marsit" in rows and "dense" in rows:
            gain = rows["dense"]["median_s"] / rows["Marsit"]["median_s"]
            found.append(f"{gain:.0f} times {'' if found else 'as fast as dense '}at {rate_text(record)}")
    return f"Marsit's all-reduce is {', '.join(found)}" if found else "Time of each method's all-reduce"


def saved_by_overlap(records: Sequence[Record]) -> Figure:
    """Part of a step that communication during backward saves, for each method, rate and length of backward."""
    rows = overlap_gains(records)
    colors = looks_of(row["method"] for row in rows)
    figure, ((axes,),) = new_figure(height=0.23 * len(rows) + 0.25 * len(rows) / len(LENGTHS) + 1.8)
    places: list[float] = []
    for number, row in enumerate(rows):
        begins = number == 0 or rows[number - 1]["group"] != row["group"]
        places.append((places[-1] if places else -0.3) + (2.25 if begins else 1.0))
        if begins:
            axes.annotate(
                row["group"], (0, places[-1] - 0.6), (2, 0), xycoords=("axes fraction", "data"),
                textcoords="offset points", fontsize=9, fontweight="bold",
            )  # fmt: skip
        axes.barh(places[-1], row["saved"], height=0.8, color=colors[row["method"]].color)
        parts = " + ".join(in_units(row[key], "s") for key in ("backward_s", "communication_s"))
        text = f"{row['saved']:.0f} %: {parts} → {in_units(row['both_s'], 's')}".replace("-", "\N{MINUS SIGN}")
        axes.annotate(
            text, (max(0.0, row["saved"]), places[-1]), (4, 0), textcoords="offset points", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    axes.set(xlabel="part of a step that is saved, %", ylabel="backward pass", ylim=(places[-1] + 0.7, 0.2))
    named_ticks(axes.yaxis, places, [row["length"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=FAINT, linewidth=0.8)
    axes.set_xlim(min(0.0, *(row["saved"] for row in rows)) - 1, 2.1 * max(row["saved"] for row in rows))
    record = records[0]
    nodes, parameters = record["settings"]["nodes"], record["n"] / 1e6
    note = (
        f"{nodes} emulated nodes with a core each, an MLP of {parameters:g} million parameters, three lengths of the "
        "backward pass. Beside each bar: backward + communication one after the other → both at once. Medians of the "
        "slowest rank."
    )
    headline(figure, overlap_title(rows), note)
    return figure


def overlap_gains(records: Sequence[Record]) -> list[Record]:
    """Rows of the records with the part of a step that overlap saves, in per cent; most saved first, by group."""
    groups: list[list[Record]] = []
    for record in _fast_first(records):
        for method in dict.fromkeys(row["method"] for row in record["rows"]):
            found = sorted((row for row in record["rows"] if row["method"] == method), key=over_communication)
            lengths = LENGTHS if len(found) == len(LENGTHS) else [f"batch {row['batch']}" for row in found]
            groups.append([
                row | {"group": f"{method}, {rate_text(record)}", "length": length,
                       "saved": 100 * (1 - row["both_s"] / (row["backward_s"] + row["communication_s"]))}
                for row, length in zip(found, lengths, strict=True)
            ])  # fmt: skip
    groups.sort(key=lambda rows: -max(row["saved"] for row in rows))
    return [row for rows in groups for row in rows]


def overlap_title(rows: Sequence[Record]) -> str:
    """The finding: the group that gains most, and the one that gains least."""
    best = {
        group: max(row["saved"] for row in rows if row["group"] == group) for group in (row["group"] for row in rows)
    }
    first, last = next(iter(best)), min(best, key=lambda group: best[group])
    text = f"Sending during backward saves up to {best[first]:.0f} % of a step with {first.replace(', ', ' at ')}"
    least = "nothing" if best[last] < 0.5 else f"at most {best[last]:.0f} %"
    return text if last == first else f"{text}, {least} with {last.replace(', ', ' at ')}"


def seconds_to_goal(records: Sequence[Record]) -> Figure:
    """Training seconds to one accuracy by each method, a panel for each rate."""
    ordered = _fast_first(records)[::-1]
    heights = [len(record["rows"]) for record in ordered]
    figure, axes = new_figure(
        1, len(ordered), height=0.3 * sum(heights) + 0.6 * len(ordered) + 1.2, sharex=True, height_ratios=heights
    )
    for (axis,), record in zip(axes, ordered, strict=True):
        looks = looks_of(row["method"] for row in record["rows"])
        for place, row in enumerate(record["rows"]):
            reached = row["to_goal_s"]
            look = looks[row["method"]]
            axis.barh(place, reached or 0, height=0.72, color=look.color)
            text = (
                "not reached"
                if reached is None
                else f"{reached:.0f} s, {in_units(row['bytes_so_far_per_rank'], 'B')} sent"
            )
            axis.annotate(text, (reached or 0, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axis.set_title(rate_text(record))
        named_ticks(axis.yaxis, range(len(record["rows"])), [row["method"] for row in record["rows"]])
        axis.set_ylim(len(record["rows"]) - 0.45, -0.55)
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False, axis="y")
        axis.margins(x=0.36)
    goal = ordered[0]["goal"]
    axes[-1][0].set_xlabel(f"training seconds to {goal:.1%} of test accuracy".replace("%", " %"))
    nodes, epochs = ordered[0]["settings"]["nodes"], ordered[0]["epochs"]
    note = (
        f"An MLP of 5.8 million parameters on Fashion-MNIST, {nodes} emulated nodes that share two cores, {epochs} "
        "epochs, one seed. Bytes: sent by a rank in all epochs."
    )
    headline(figure, goal_title(ordered), note)
    return figure


def goal_title(ordered: Sequence[Record]) -> str:
    """The finding: how many times as fast as dense Marsit reaches the goal, on the slowest links."""
    record = ordered[0]
    times = {row["method"]: row["to_goal_s"] for row in record["rows"] if row["to_goal_s"] is not None}
    ours = [time for name, time in times.items() if name.startswith("Marsit")]
    goal = f"{record['goal']:.1%}".replace("%", " %").replace(".0", "")
    if not ours or "dense" not in times:
        return f"Training seconds to {goal} of test accuracy"
    gains = " to ".join(dict.fromkeys(f"{times['dense'] / time:.1f}" for time in (max(ours), min(ours))))
    return f"Training with Marsit reaches {goal} accuracy {gains} times as fast as dense at {rate_text(record)}"


def _fast_first(records: Sequence[Record]) -> list[Record]:
    from collectives.cost.rate import Rate

    return sorted(records, key=lambda one: -(Rate.parse(one["settings"]["rate"]).bits_per_s or float("inf")))
