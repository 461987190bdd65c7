"""The grid of measurements: a cell is a cluster and the size of a vector."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from apps.emulator.network import Layout
from collectives.cost.rate import Rate

RATES = ("100mbit", "1gbit", "10gbit", "none")
SIZES = ("4kB", "64kB", "1MB", "16MB", "100MB", "400MB")
TWO_LEVEL = "1gbit/100mbit"
BUDGET_S, TARGET_BUDGET_S = 15.0, 60.0
"""Seconds of timed calls with Open MPI in a cell, and in one that targets are of."""
UNITS = {"kB": 1_000, "MB": 1_000_000}


@dataclass(frozen=True)
class Cluster:
    """A cluster: nodes, the rate of each one's egress, and that between the two halves of the nodes.

    Rates are as `Rate.parse` takes them; `between` "none": the nodes are not in halves.
    """

    nodes: int
    rate: str
    between: str = "none"

    @classmethod
    def parse(cls, nodes: int, text: str) -> Cluster:
        """``"1gbit"``, ``"none"``, or ``"1gbit/100mbit"``: two groups and the rate between them; else ValueError."""
        rate, _, between = text.partition("/")
        made = cls(nodes, rate, between or "none")
        _ = made.layout
        return made

    @property
    def layout(self) -> Layout:
        """Return the layout for `Network`."""
        between = Rate.parse(self.between)
        groups = 1 if between.bits_per_s is None else 2
        return Layout((Rate.parse(self.rate),) * self.nodes, groups, between)

    @property
    def bits_per_s(self) -> float | None:
        """Rate of the slowest link; None: not limited."""
        known = [rate.bits_per_s for rate in (Rate.parse(self.rate), Rate.parse(self.between)) if rate.bits_per_s]
        return min(known, default=None)

    @property
    def links(self) -> str:
        """``"1gbit"`` or ``"1gbit/100mbit"``."""
        return self.rate if self.between == "none" else f"{self.rate}/{self.between}"

    @property
    def name(self) -> str:
        """Name in files."""
        return f"{self.nodes}x{self.links.replace('/', '-')}"


@dataclass(frozen=True)
class Cell:
    """A cluster and the size of a float32 vector."""

    cluster: Cluster
    nbytes: int

    @property
    def n(self) -> int:
        """Elements."""
        return self.nbytes // 4

    @property
    def name(self) -> str:
        """Name in files."""
        return f"{self.cluster.name}-{size_text(self.nbytes)}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for the record."""
        return {**asdict(self.cluster), "bytes": self.nbytes}


def parse_size(text: str) -> int:
    """``"64kB"``, ``"16MB"`` in bytes; else ValueError."""
    found = re.fullmatch(r"([\d.]{1,20})(kB|MB)", text.strip())  # more digits may be beyond float64
    nbytes = round(float(found[1]) * UNITS[found[2]]) if found else 0
    if nbytes < 4 or nbytes % 4:
        raise ValueError(f"{text!r} is no size of a float32 vector: write 64kB, 16MB")
    return nbytes


def size_text(nbytes: int) -> str:
    """The opposite of `parse_size`."""
    unit = "MB" if nbytes >= UNITS["MB"] else "kB"
    return f"{nbytes / UNITS[unit]:g}{unit}"


def product(nodes: Iterable[int], links: Iterable[str], sizes: Iterable[str]) -> list[Cell]:
    """All combinations, sizes fastest: one cluster stands for all sizes."""
    nbytes, links = [parse_size(size) for size in sizes], list(links)
    return [Cell(Cluster.parse(count, link), size) for count in nodes for link in links for size in nbytes]


def default_plan() -> list[Cell]:
    """Four nodes in full; other numbers of nodes and the two-level network at chosen rates and sizes: 1.5 hours."""
    return [
        *product((4,), RATES, SIZES),
        *product((8,), (TWO_LEVEL,), ("64kB", "1MB", "16MB", "100MB")),
        *product((2, 8), ("1gbit", "10gbit", "none"), ("64kB", "100MB")),
        *product((2, 8), ("100mbit",), ("16MB",)),
        *product((3, 5, 6, 7), ("1gbit",), ("16MB",)),
    ]


def by_cluster(cells: Sequence[Cell]) -> dict[Cluster, list[Cell]]:
    """The cells of each cluster, in order."""
    found: dict[Cluster, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.cluster, []).append(cell)
    return found
