"""Three figures: time against ranks, throughput against processors, and where a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes

from apps.figure_style import PALE, known_look, looks_of
from apps.plotting import (
    STAGE_COLORS,
    Bars,
    draw_bars,
    headline,
    in_units,
    mark_level,
    name_lines,
    named_ticks,
    new_figure,
    save,
    unit_ticks,
)
from apps.scale.simulations import LINES, TOPOLOGIES, Point
from collectives import LinkModel

CALLED = {
    "dense": "dense",
    "one-bit": "Marsit",
    "one winner": "Marsit, one winner",
    "two winners": "Marsit, two winners",
}
"""The methods as the figures name them."""
THROUGHPUT = (("ring", "dense"), ("torus", "dense"), ("ring", "one-bit"), ("torus", "one-bit"),
              ("ring", "one winner"), ("ring", "two winners"))  # fmt: skip
SPLIT = ("dense", "one-bit")
SIMULATED = "Simulated, message by message"


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
    split = [Point("torus", method, count, model.n, asked[-1][0]) for method in SPLIT for count in split_ranks]
    return found + split


def plot_times(networks: Networks, n: int, ranks: Sequence[int], times: Times, path: Path) -> Path:
    """Time of an all-reduce against the number of ranks: panels below each other, whose text fits half the width."""
    shown = list(product(networks.items(), SPLIT))
    figure, panels = new_figure(1, len(shown), height=2.6 * len(shown) + 1.0, sharex=True)
    for axis, ((name, network), merging) in zip(panels.flat, shown, strict=True):
        for topology, method in LINES:
            if (method == "dense") == (merging == "dense"):
                winners = method if method not in SPLIT else ""
                look = known_look(CALLED[method] if winners else topology)
                assert look is not None
                seconds = [times[Point(topology, method, count, n, network)] for count in ranks]
                axis.plot(ranks, seconds, label=winners or topology, **look._asdict())
        _ranks(axis, ranks)
        axis.set_yscale("log")
        axis.set_title(f"{CALLED[merging]}, {name}", fontsize=12)
        axis.tick_params(labelsize=12)
        unit_ticks(axis.yaxis, "s")
        axis.set_xlim(ranks[0] / 1.3, ranks[-1] * 1.3)
    for axis in panels.flat:
        name_lines(axis, size=12)
    panels[-1][0].set_xlabel("ranks", fontsize=12)
    figure.supylabel("time of an all-reduce (log scale)", fontsize=12)
    note = (
        f"{SIMULATED}: all-reduces of {n / 1e6:g} million elements over each topology. Shared links: ten times as fast "
        "within the group. One winner, two winners: Marsit's signs go round a ring once."
    )
    headline(figure, times_title(next(iter(networks.values())), n, ranks[-1], times), note)
    return save(figure, path)


def times_title(network: LinkModel, n: int, ranks: int, times: Times) -> str:
    """The finding: how many times as fast Marsit is over the best topology, and over a ring."""
    found = {method: {topology: times[Point(topology, method, ranks, n, network)] for topology in TOPOLOGIES}
             for method in SPLIT}  # fmt: skip
    dense, ours = (min(found[method].values()) for method in SPLIT)
    return (
        f"On {ranks} ranks, Marsit's all-reduce is {dense / ours:.0f} times as fast as dense over the best topology, "
        f"{found['dense']['ring'] / found['one-bit']['ring']:.1f} times over a ring"
    )


def plot_throughput(networks: Networks, model: Model, ranks: Sequence[int], times: Times, path: Path) -> Path:
    """Samples per second against processors, as a part of processors that never wait; a row for each network."""
    figure, panels = new_figure(1, len(networks), height=2.6 * len(networks) + 1.0, sharex=True)
    looks = looks_of(_line(topology, method) for topology, method in THROUGHPUT)
    for (axis,), (name, network) in zip(panels, networks.items(), strict=True):
        for topology, method in THROUGHPUT:
            parts = [100 * part_of_ideal(model, times[Point(topology, method, count, model.n, network)])
                     for count in ranks]  # fmt: skip
            line = _line(topology, method)
            axis.plot(ranks, parts, label=line, **looks[line]._asdict())
        _ranks(axis, ranks)
        axis.set_title(name)
        axis.set(ylim=(0, 109), ylabel="% of the ideal")
        mark_level(axis, 100, "processors that never wait")
        name_lines(axis, size=8.5)
    panels[-1][0].set_xlabel("processors")
    note = (
        f"{SIMULATED}: training of {model.n / 1e6:g} million parameters, {in_units(model.compute_s, 's')} of computing "
        f"for {model.batch} samples a processor, and then the all-reduce."
    )
    headline(figure, throughput_title(model, next(iter(networks.values())), ranks[-1], times), note)
    return save(figure, path)


def throughput_title(model: Model, network: LinkModel, ranks: int, times: Times) -> str:
    """The finding: the part of the ideal that Marsit and dense reach over a torus."""
    dense, ours = (
        100 * part_of_ideal(model, times[Point("torus", method, ranks, model.n, network)]) for method in SPLIT
    )
    return (
        f"{ranks} processors train at {ours:.0f} % of their ideal speed with Marsit over a torus, "
        f"at {dense:.0f} % with dense"
    )


def part_of_ideal(model: Model, reduce_s: float) -> float:
    """Return the part of a step in which processors compute."""
    return model.compute_s / (model.compute_s + reduce_s)


def plot_split(
    network: LinkModel, model: Model, batches: tuple[int, int], ranks: Sequence[int], times: Times, path: Path
) -> Path:
    """Stacked bars: computing and the all-reduce, for mini-batches of several sizes and numbers of processors."""
    panels = []
    for batch in batches:
        compute_s = model.compute_s * batch / model.batch
        parts = {
            f"{CALLED[method]}, {count} processors": [
                1e3 * compute_s, 1e3 * times[Point("torus", method, count, model.n, network)]
            ]
            for count in ranks for method in SPLIT
        }  # fmt: skip
        texts = {name: in_units(1e-3 * sum(both), "s") for name, both in parts.items()}
        panels.append(Bars(f"{batch} samples a processor", parts, texts))
    looks = [{"color": PALE}, {"color": STAGE_COLORS[1]}]
    rate = 8 * (network.uplink_bytes_s or network.bandwidth_bytes_s)
    figure = draw_bars(panels, ("computing", "all-reduce"), "time of a step, ms", looks)
    shared = f"groups of {network.group_size} ranks that share an uplink of {in_units(rate, 'bit/s')}"
    note = f"{SIMULATED}: {model.n / 1e6:g} million parameters over a torus, {shared}."
    headline(figure, split_title(network, model, batches, ranks[-1], times), note)
    return save(figure, path)


def split_title(network: LinkModel, model: Model, batches: tuple[int, int], ranks: int, times: Times) -> str:
    """The finding: how many times as fast a step is with Marsit, for small and large mini-batches."""
    dense, ours = (times[Point("torus", method, ranks, model.n, network)] for method in SPLIT)
    computing = [model.compute_s * batch / model.batch for batch in batches]
    few, many = ((one + dense) / (one + ours) for one in computing)
    return (
        f"On {ranks} processors, Marsit's step is {few:.1f} times as fast as dense with {batches[0]} samples a "
        f"processor, {many:.1f} times with {batches[1]}"
    )


def _line(topology: str, method: str) -> str:
    return f"{CALLED[method]}, {topology}"


def _ranks(axis: Axes, ranks: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    named_ticks(axis.xaxis, ranks, [str(count) for count in ranks])
