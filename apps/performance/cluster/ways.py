"""What is compared in a cell, what each way should take there, and what is left out because it would take too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from apps.performance.cluster.grid import Cell
from collectives.schedules.registry import topology

COPY_BYTES_PER_S = 1.0e9  # what one core gets through MPI, TCP and the sum, roughly
CORES = 2
LATENCY_S = 2e-4  # of a round
LEAST_REPEATS, LEAST_OPTIONAL = 3, 2  # timed calls in each job: of ways that are core, and of the others
SLOW_S = 2.0  # calls expected to take longer are timed from the first one
MEMORY_PART = 0.7  # of what is free
ONE_BIT = ("ring", "segmented-ring", "torus", "tree", "double-tree", "halving-doubling", "star")
MOST_NODES_OF_A_STAR = 4
# Of Open MPI's coll_tuned_allreduce_algorithm.
TUNED = {2: "reduce + broadcast", 3: "recursive doubling", 4: "ring", 5: "segmented ring", 6: "Rabenseifner"}
SEGMENTED_RING, SEGMENT_BYTES = 5, 1 << 20  # its default of 0 bytes makes it the ring
TUNED_WAYS = {f"MPI {name}": str(number) for number, name in TUNED.items()} | {
    "MPI segmented ring, 1 MiB": f"{SEGMENTED_RING}:{SEGMENT_BYTES}"
}
MPI_DEFAULT, MPICH_DEFAULT, GLOO = "MPI default", "MPICH", "Gloo"
DENSE_RING, DENSE_AUTO, ONE_BIT_RING, MARSIT_RING = "dense ring", "dense auto", "one-bit ring", "Marsit ring"
LIBRARIES = ("openmpi", "mpich")


@dataclass(frozen=True)
class Way:
    """One way to sum or average vectors.

    Attributes
    ----------
    name : str
    kind : "one-bit", "marsit", "dense", "mpi", "tuned" or "gloo"
    option : str
        Topology, or number of the algorithm, and behind a colon the bytes of a segment.
    core : bool
        Wanted even where time is short.
    """

    name: str
    kind: str
    option: str = ""
    core: bool = False

    @property
    def packed(self) -> bool:
        """One bit per element travels."""
        return self.kind in ("one-bit", "marsit")

    @property
    def least(self) -> int:
        """Calls that each job times at least."""
        return LEAST_REPEATS if self.core else LEAST_OPTIONAL

    def load(self, nodes: int) -> float:
        """What the busiest rank sends, in vectors of float32; a coarse guess."""
        even = 2 * (nodes - 1) / nodes
        by_topology = {"tree": 2 * log2(nodes), "double-tree": 2.0, "star": nodes - 1.0}
        by_algorithm = {"2": 2.0, "3": log2(nodes)}
        factor = (by_algorithm if self.kind == "tuned" else by_topology).get(self.option, even)
        return factor / 32 if self.packed else factor

    def predicted_s(self, cell: Cell) -> float:
        """Seconds of a call, from the wire or from the processors that all ranks share."""
        nodes, rate = cell.net.nodes, cell.net.bits_per_s
        sent = cell.nbytes * self.load(nodes)
        wire_s = 0.0 if rate is None else 8 * sent / rate
        if cell.net.between != "none" and self.option in ("3", "6", "2", "star", "halving-doubling"):
            wire_s *= nodes / 2  # all nodes of a half cross at once
        compute_s = (cell.nbytes / 10 + sent) * nodes / min(nodes, CORES) / COPY_BYTES_PER_S
        return max(wire_s, compute_s) + 2 * log2(nodes) * LATENCY_S


def of_library(library: str, nodes: int) -> list[Way]:
    """All ways that a job of this library can go; with MPICH only what leads over to the other jobs."""
    ring = Way(DENSE_RING, "dense", "ring", core=True)
    one_bit_ring = Way(ONE_BIT_RING, "one-bit", "ring", core=True)
    if library == "mpich":
        return [one_bit_ring, ring, Way(MPICH_DEFAULT, "mpi", core=True)]
    fitting = [name for name in ONE_BIT if fits(name, nodes)]
    return [
        one_bit_ring,
        *(Way(f"one-bit {name}", "one-bit", name, core=True) for name in fitting if name != "ring"),
        Way(MARSIT_RING, "marsit", "ring", core=True),
        *(Way(f"Marsit {name}", "marsit", name, core=True) for name in fitting if name == "torus"),
        ring,
        Way(DENSE_AUTO, "dense", "auto"),
        Way(MPI_DEFAULT, "mpi", core=True),
        *(Way(name, "tuned", option, core=option == "4") for name, option in TUNED_WAYS.items()),
        Way(GLOO, "gloo", core=True),
    ]


def fits(name: str, nodes: int) -> bool:
    """Whether a topology is one of its own on so many nodes."""
    if name == "torus":  # with one row it is a ring
        return any(nodes % rows == 0 for rows in range(2, int(nodes**0.5) + 1))
    topology(name).plan(0, nodes)
    return True


def choose(ways: Sequence[Way], cell: Cell, budget_s: float, longest_s: float) -> tuple[list[Way], dict[str, str]]:
    """The ways that are measured in a cell, and why the others are not.

    Parameters
    ----------
    ways : sequence of Way
    cell : Cell
    budget_s : float
        Of the cell; ways that are not core give way where `LEAST_REPEATS` calls of each take longer.
    longest_s : float
        Of a call.

    Returns
    -------
    chosen : list of Way
        In the order given.
    left_out : dict
        Name and reason.
    """
    left_out = {}
    for way in ways:
        expected_s = way.predicted_s(cell)
        if way.option == "star" and cell.net.nodes > MOST_NODES_OF_A_STAR:
            left_out[way.name] = f"more than {MOST_NODES_OF_A_STAR} nodes, and its centre sends to each of the others"
        elif expected_s > longest_s:
            left_out[way.name] = f"would take {expected_s:.0f} s a call"
    chosen = [way for way in ways if way.name not in left_out]
    optional = sorted((way for way in chosen if not way.core), key=lambda way: way.predicted_s(cell))
    while optional and LEAST_REPEATS * sum(way.predicted_s(cell) for way in chosen) > budget_s:
        slowest = optional.pop()
        chosen.remove(slowest)
        left_out[slowest.name] = f"no time: {slowest.predicted_s(cell):.1f} s a call"
    return chosen, left_out


def memory_bytes(ways: Sequence[Way], cell: Cell) -> int:
    """Of all ranks together: input, output, what MPI's algorithms allocate, residuals and packed signs."""
    residuals = sum(way.kind == "marsit" for way in ways)
    packed = sum(way.packed for way in ways)
    return round(cell.net.nodes * (cell.nbytes * (3 + residuals + packed / 16) + 200e6))
