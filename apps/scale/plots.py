"""Three figures: time against ranks, throughput against processors, and where a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from apps.plotting import legend, named_ticks, new_figure, save
from apps.scale.simulations import LINES, METHODS, TOPOLOGIES, Point
from collectives import LinkModel

STYLES: dict[str, Any] = dict(zip(METHODS, ("-", "--", "-.", ":"), strict=True))
COLOURS = dict(zip(TOPOLOGIES, ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"), strict=True))
# lines that are drawn first are wider, so that those which coincide can be seen
WIDTHS = dict(zip(TOPOLOGIES, (5.0, 3.5, 2.5, 1.8, 1.0), strict=True))
THROUGHPUT = (("ring", "dense"), ("torus", "dense"), ("ring", "one-bit"), ("torus", "one-bit"),
              ("ring", "one winner"), ("ring", "two winners"))  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Model that is trained: `n` parameters; `compute_s` of a step on one processor, which takes `batch` samples."""

    n: int
    compute_s: float
    batch: int


Networks = Mapping[str, LinkModel]
Times = Mapping[Point, float]


def points(networks: Networks, model: Model, n: int, ranks: Sequence[int], split_ranks: Sequence[int]) -> list[Point]:
    """Return the points of the three figures; the last figure is of the last network."""
    asked = [(network, line, length) for network in networks.values()
             for lines, length in ((LINES, n), (THROUGHPUT, model.n)) for line in lines]  # fmt: skip
    found = [Point(*line, count, length, network) for network, line, length in asked for count in ranks]
    split = [Point("torus", method, count, model.n, asked[-1][0]) for method in METHODS for count in split_ranks]
    return found + split


def plot_times(networks: Networks, n: int, ranks: Sequence[int], times: Times, path: Path) -> None:
    """Time of an all-reduce against the number of ranks, a panel for each network."""
    figure, panels = new_figure(len(networks), size=(12, 4.8))
    for axis, (name, network) in zip(panels[0], networks.items(), strict=True):
        for topology, method in LINES:
            seconds = [1e3 * times[Point(topology, method, count, n, network)] for count in ranks]
            axis.plot(ranks, seconds, **_look(topology, method))
        _ranks(axis, ranks)
        axis.set(yscale="log", title=name, xlabel="ranks")
    panels[0][0].set_ylabel(f"all-reduce of {n / 1e6:g} M elements, ms")
    handles = [Line2D([], [], color=COLOURS[name], linewidth=WIDTHS[name], label=name) for name in TOPOLOGIES]
    handles += [Line2D([], [], color="black", linestyle=style, label=method) for method, style in STYLES.items()]
    legend(figure, handles)
    save(figure, path)


def plot_throughput(networks: Networks, model: Model, ranks: Sequence[int], times: Times, path: Path) -> None:
    """Samples per second against the number of processors, and their part of the ideal."""
    figure, panels = new_figure(len(networks), 2, size=(12, 7), sharex=True, sharey="row")
    alone = model.batch / model.compute_s
    for column, (name, network) in enumerate(networks.items()):
        above, below = panels[:, column]
        above.plot(ranks, [alone * count for count in ranks], ":", color="black", label="ideal")
        for topology, method in THROUGHPUT:
            parts = [model.compute_s / (model.compute_s + times[Point(topology, method, count, model.n, network)])
                     for count in ranks]  # fmt: skip
            look = _look(topology, method)
            rates = [alone * count * part for count, part in zip(ranks, parts, strict=True)]
            above.plot(ranks, rates, label=f"{method}, {topology}", **look)
            below.plot(ranks, [100 * part for part in parts], **look)
        above.set(yscale="log", title=name)
        below.set(xlabel="processors", ylim=(0, 102))
        _ranks(below, ranks)
    panels[0][0].set_ylabel("samples per second")
    panels[1][0].set_ylabel("% of ideal")
    panels[0][0].legend(frameon=False, handlelength=5)
    save(figure, path)


def plot_split(
    network: LinkModel, model: Model, batches: Sequence[int], ranks: Sequence[int], times: Times, path: Path
) -> None:
    """Stacked bars: computing and the all-reduce, for mini-batches of several sizes and numbers of processors."""
    figure, panels = new_figure(len(batches), size=(12, 4.2))
    for axis, batch in zip(panels[0], batches, strict=True):
        compute_s = model.compute_s * batch / model.batch
        labels, computing, reducing = [], [], []
        for count in ranks:
            whole = compute_s + times[Point("torus", "dense", count, model.n, network)]
            for method in METHODS:
                labels.append(f"{method}\n{count}".replace(" ", "\n"))
                computing.append(100 * compute_s / whole)
                reducing.append(100 * times[Point("torus", method, count, model.n, network)] / whole)
        places = [i + i // len(METHODS) * 0.6 for i in range(len(labels))]
        axis.bar(places, computing, color="tab:gray", label="computing")
        axis.bar(places, reducing, bottom=computing, color="tab:blue", label="all-reduce")
        for place, below, above in zip(places, computing, reducing, strict=True):
            axis.text(place, below + above + 1, f"{below + above:.0f}", ha="center", fontsize=8)
        axis.set_xticks(places, labels, fontsize=6.5)
        axis.set(title=f"{batch} samples a processor", ylim=(0, 112), xlabel="processors")
    panels[0][0].set_ylabel("% of a dense step")
    handles, names = panels[0][0].get_legend_handles_labels()
    legend(figure, handles, names)
    save(figure, path)


def _look(topology: str, method: str) -> dict[str, Any]:
    return {
        "linestyle": STYLES[method], "color": COLOURS[topology], "linewidth": WIDTHS[topology], "alpha": 0.8
    }  # fmt: skip


def _ranks(axis: Axes, ranks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    named_ticks(axis.xaxis, ranks, [str(count) for count in ranks])
    axis.grid(alpha=0.3)
