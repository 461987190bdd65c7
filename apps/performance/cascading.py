"""What cascading compression leaves of the mean's signs and amplitude.

The first M ranks of the job reduce vectors over a ring, for each M; Marsit's one-bit merge is shown beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpicomp
from apps.environment import environment
from apps.performance.record import footer, parser, publish, table
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm

ELEMENTS = 78_000
VECTORS = {"independent": 0.0, "half in common": 1.0}
"""Standard deviation of what the ranks' vectors share, besides an own part of standard deviation 1."""

METHODS: dict[str, Algorithm] = {
    "cascading": mpicomp.CascadingSSDM(),
    "one-bit": mpicomp.Marsit(None, compensation=False, global_step=1.0),
}


def measure(rank_counts: Sequence[int], n: int, repeats: int) -> Record | None:
    """Reduce `repeats` vectors of each sort; collective over all ranks; rank 0 has the record."""
    world = MPI.COMM_WORLD
    rows: list[dict[str, Any]] = []
    for ranks in rank_counts:
        part = world.Split(0 if world.rank < ranks else MPI.UNDEFINED, world.rank)
        if part == MPI.COMM_NULL:
            continue
        with Communicator(part, topology="ring") as comm:
            for sort, shared in VECTORS.items():
                rows.append({"ranks": ranks, "vectors": sort, **_compare(comm, shared, n, repeats)})
        part.Free()
    if world.rank:
        return None
    settings = {"n": n, "vectors": repeats}
    return {"part": "cascading", "settings": settings, "environment": environment(), "rows": rows}


def _compare(comm: Communicator, shared: float, n: int, repeats: int) -> dict[str, float]:
    """Matching rates and amplitudes, as the mean over vectors."""
    aggregators = {name: options.start(comm, n) for name, options in METHODS.items()}
    found: dict[str, list[float]] = {}
    for number in range(repeats):
        common = np.random.default_rng((number, 0)).standard_normal(n, np.float32)
        own = np.random.default_rng((number, 1 + comm.rank)).standard_normal(n, np.float32)
        x = np.float32(shared) * common + own
        mean = comm.allreduce(x, "mean")
        for name, aggregator in aggregators.items():
            result = aggregator.aggregate(x)
            found.setdefault(f"{name}_match", []).append(matching_rate(result, mean))
            found.setdefault(f"{name}_amplitude", []).append(amplitude(result, mean))
    return {key: float(np.mean(values)) for key, values in found.items()}


def matching_rate(result: NDArray[Any], exact: NDArray[Any]) -> float:
    """Fraction of elements whose sign is that of the exact mean; 0 counts as positive."""
    return float(np.mean((result >= 0) == (exact >= 0)))


def amplitude(result: NDArray[Any], exact: NDArray[Any]) -> float:
    """Two-norm in units of the exact mean's."""
    return float(np.linalg.norm(result.astype(np.float64)) / np.linalg.norm(exact.astype(np.float64)))


def render(record: Record) -> str:
    """Markdown."""
    rows = [
        (
            f"{row['ranks']}, {row['vectors']}",
            f"{row['cascading_match']:.1%}",
            f"{row['cascading_amplitude']:.1e}",
            f"{row['one-bit_match']:.1%}",
            f"{row['one-bit_amplitude']:.2f}",
        )
        for row in record["rows"]
    ]
    columns = (
        "ranks, vectors",
        "cascading: signs that match",
        "amplitude",
        "one-bit merge: signs that match",
        "amplitude",
    )
    return table(columns, rows) + footer(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    mpicomp.install_abort_hook()
    options = parser("cascading", "Signs and amplitude after cascading compression.").parse_args(argv)
    most = MPI.COMM_WORLD.size
    counts = range(min(3, most), most + 1)
    publish(measure(counts, 2000 if options.quick else ELEMENTS, 2 if options.quick else 20), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
