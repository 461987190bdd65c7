"""The all-reduces that are compared, their expected times in a cell, and those left out as too slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from apps.performance.cluster.grid import Cell
from collectives.schedules.registry import topology

COPY_BYTES_PER_S = 1.0e9  # throughput of one core through MPI, TCP and the sum, roughly
CORES = 2
LATENCY_S = 2e-4  # of a round
LEAST_REPEATS, LEAST_OPTIONAL = 3, 2  # timed calls in each job: of implementations that are core, and of the others
SLOW_S = 2.0  # calls expected to take longer are timed from the first one
MEMORY_PART = 0.7  # of the free memory
ONE_BIT = ("ring", "segmented-ring", "torus", "tree", "double-tree", "halving-doubling", "star")
MOST_NODES_OF_A_STAR = 4
# Of Open MPI's coll_tuned_allreduce_algorithm.
TUNED = {2: "reduce + broadcast", 3: "recursive doubling", 4: "ring", 5: "segmented ring", 6: "Rabenseifner"}
SEGMENTED_RING, SEGMENT_BYTES = 5, 1 << 20  # its default of 0 bytes makes it the ring
TUNED_NAMES = {f"MPI {name}": str(number) for number, name in TUNED.items()} | {
    "MPI segmented ring, 1 MiB": f"{SEGMENTED_RING}:{SEGMENT_BYTES}"
}
MPI_DEFAULT, MPICH_DEFAULT, GLOO = "MPI default", "MPICH", "Gloo"
DENSE_RING, DENSE_AUTO, ONE_BIT_RING, MARSIT_RING = "dense ring", "dense auto", "one-bit ring", "Marsit ring"


@dataclass(frozen=True)
class Implementation:
    """An all-reduce of the kind "one-bit", "marsit", "dense", "mpi", "tuned" or "gloo".

    `option` is its topology, or the number of its algorithm and behind a colon the bytes of a segment. What is `core`
    is wanted even where time is short.
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
        """Vectors of float32 that the busiest rank sends; a coarse guess."""
        even = 2 * (nodes - 1) / nodes
        by_topology = {"tree": 2 * log2(nodes), "double-tree": 2.0, "star": nodes - 1.0}
        by_algorithm = {"2": 2.0, "3": log2(nodes)}
        factor = (by_algorithm if self.kind == "tuned" else by_topology).get(self.option, even)
        return factor / 32 if self.packed else factor

    def predicted_s(self, cell: Cell) -> float:
        """Seconds of a call, from the wire or from the processors that all ranks share."""
        nodes, rate = cell.cluster.nodes, cell.cluster.bits_per_s
        sent = cell.nbytes * self.load(nodes)
        wire_s = 0.0 if rate is None else 8 * sent / rate
        if cell.cluster.between != "none" and self.option in ("3", "6", "2", "star", "halving-doubling"):
            wire_s *= nodes / 2  # all nodes of a half cross at once
        compute_s = (cell.nbytes / 10 + sent) * nodes / min(nodes, CORES) / COPY_BYTES_PER_S
        return max(wire_s, compute_s) + 2 * log2(nodes) * LATENCY_S


def of_library(library: str, nodes: int) -> list[Implementation]:
    """All-reduces that a job with this library can call; with MPICH only those that link its jobs with the others."""
    ring = Implementation(DENSE_RING, "dense", "ring", core=True)
    one_bit_ring = Implementation(ONE_BIT_RING, "one-bit", "ring", core=True)
    if library == "mpich":
        return [one_bit_ring, ring, Implementation(MPICH_DEFAULT, "mpi", core=True)]
    fitting = [name for name in ONE_BIT if fits(name, nodes)]
    return [
        one_bit_ring,
        *(Implementation(f"one-bit {name}", "one-bit", name, core=True) for name in fitting if name != "ring"),
        Implementation(MARSIT_RING, "marsit", "ring", core=True),
        *(Implementation(f"Marsit {name}", "marsit", name, core=True) for name in fitting if name == "torus"),
        ring,
        Implementation(DENSE_AUTO, "dense", "auto"),
        Implementation(MPI_DEFAULT, "mpi", core=True),
        *(Implementation(name, "tuned", option, core=option == "4") for name, option in TUNED_NAMES.items()),
        Implementation(GLOO, "gloo", core=True),
    ]


def fits(name: str, nodes: int) -> bool:
    """Return True if a topology differs from the others on so many nodes."""
    if name == "torus":  # with one row it is a ring
        return any(nodes % rows == 0 for rows in range(2, int(nodes**0.5) + 1))
    topology(name).plan(0, nodes)
    return True


def choose(
    known: Sequence[Implementation], cell: Cell, budget_s: float, longest_s: float
) -> tuple[list[Implementation], dict[str, str]]:
    """The implementations that are measured in a cell, in the order given, and by name why the others are not.

    No call takes longer than `longest_s`. Implementations that are not core are left out where `LEAST_REPEATS` calls of
    each take longer than the cell's `budget_s`.
    """
    left_out = {}
    for one in known:
        expected_s = one.predicted_s(cell)
        if one.option == "star" and cell.cluster.nodes > MOST_NODES_OF_A_STAR:
            left_out[one.name] = f"more than {MOST_NODES_OF_A_STAR} nodes, and its centre sends to each of the others"
        elif expected_s > longest_s:
            left_out[one.name] = f"would take {expected_s:.0f} s a call"
    chosen = [one for one in known if one.name not in left_out]
    optional = sorted((one for one in chosen if not one.core), key=lambda one: one.predicted_s(cell))
    while optional and LEAST_REPEATS * sum(one.predicted_s(cell) for one in chosen) > budget_s:
        slowest = optional.pop()
        chosen.remove(slowest)
        left_out[slowest.name] = f"no time: {slowest.predicted_s(cell):.1f} s a call"
    return chosen, left_out


def memory_bytes(known: Sequence[Implementation], cell: Cell) -> int:
    """Return the memory of all ranks: input, output, buffers of MPI's algorithms, residuals and packed signs."""
    residuals = sum(one.kind == "marsit" for one in known)
    packed = sum(one.packed for one in known)
    return round(cell.cluster.nodes * (cell.nbytes * (3 + residuals + packed / 16) + 200e6))
