"""The dense all-reduce against MPI's by vector size: ``mpirun -n 2 python -m apps.performance.dense_sizes``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import mpicomp
from apps.environment import environment
from apps.performance.record import both, footer, parser, publish, scaled, table
from apps.records import Record
from collectives import Communicator
from collectives.memory import aligned_empty
from mpicomp.cli.timing import alternate, summary

US = 1e-6
KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    4 * KIB,
    16 * KIB,
    64 * KIB,
    128 * KIB,
    256 * KIB,
    512 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    100_000_000,
    400_000_000,
)
SECONDS_A_SIZE = 12.0  # about as long as each size is measured
FROM_HERE_RATIO = 256 * KIB  # below, the target is a difference
RING_FROM = 4 * MIB


def repeats_for(nbytes: int) -> int:
    """Calls of each way, at a guessed GB/s for three ways and 50 us a call."""
    return max(11, min(2000, int(SECONDS_A_SIZE / (3 * (nbytes / 1e9 + 50e-6)))))


def measure(sizes: Sequence[int], most_repeats: int) -> Record | None:
    """Time every size; collective; rank 0 has the record."""
    rows: list[dict[str, Any]] = []
    with Communicator(topology="ring") as comm, Communicator() as automatic:
        for nbytes in sizes:
            n = nbytes // 4
            x, out = aligned_empty(n, np.float32, 64), aligned_empty(n, np.float32, 64)
            np.random.default_rng((0, comm.rank)).standard_normal(n, np.float32, out=x)
            sides = {
                "mpi": partial(comm.mpi_comm.Allreduce, x, out),
                "auto": partial(automatic.allreduce, x, out=out),
                "ring": partial(comm.allreduce, x, out=out),
            }
            repeats = min(most_repeats, repeats_for(nbytes))
            timed = {way: summary(seconds) for way, seconds in alternate(sides, repeats, comm=comm).items()}
            rows.append({"nbytes": nbytes, "repeats": repeats, **timed})
        facts = environment()
        settings = {"ranks": comm.size, "repeats": f"up to {most_repeats}"}
        return None if comm.rank else {"part": "dense-sizes", "settings": settings, "environment": facts, "rows": rows}


def render(record: Record) -> str:
    """Markdown."""
    columns = (
        "bytes",
        "MPI_Allreduce, µs",
        "auto, µs",
        "beyond MPI, µs",
        "speed-up",
        "target",
        "ring, µs",
        "its speed-up",
        "target",
    )
    return table(columns, [_cells(row) for row in record["rows"]]) + footer(record)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    mpi, auto, ring = (row[way]["median_s"] for way in ("mpi", "auto", "ring"))
    return (
        f"{row['nbytes']:,}",
        both(row["mpi"], US),
        both(row["auto"], US),
        scaled(auto - mpi, US),
        f"{mpi / auto:.2f}",
        "≥ 0.95" if row["nbytes"] >= FROM_HERE_RATIO else "≤ 25 µs beyond",
        both(row["ring"], US),
        f"{mpi / ring:.2f}",
        "≥ 1.0" if row["nbytes"] >= RING_FROM else "",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    mpicomp.install_abort_hook()
    options = parser("dense_sizes", "The dense all-reduce against MPI's, by size.").parse_args(argv)
    record = measure((4 * KIB, 256 * KIB), 3) if options.quick else measure(SIZES, 2000)
    publish(record, render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
