"""Time all-reduces against MPI_Allreduce of the same vectors: ``mpirun -n 2 python -m apps.performance.allreduce``."""

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
from collectives import Communicator, Traffic
from collectives.memory import aligned_empty
from mpicomp.cli.timing import alternate, gather, summary

MS = 1e-3
MPI_ALONE = "MPI_Allreduce"

ONE_BIT = {
    "one-bit ring alone": mpicomp.Marsit(None, compensation=False, global_step=1.0),
    'Marsit, residual "own"': mpicomp.Marsit(None),
    'Marsit, residual "paper"': mpicomp.Marsit(None, residual="paper"),
}

# Speed-up over MPI_Allreduce by way and number of ranks.
TARGETS = {
    ("one-bit ring alone", 2): "≥ 3.6",
    ("one-bit ring alone", 4): "≥ 4.3",
    ('Marsit, residual "own"', 2): "≥ 2.5",
    ('Marsit, residual "paper"', 2): "≥ 2.5",
    ("dense ring", 2): "≥ 1.0",
    ("dense ring", 4): "≥ 1.0",
    ("dense auto", 2): "≥ 0.95",
    ("dense auto", 4): "≥ 0.95",
}


def measure(n: int, repeats: int) -> Record | None:
    """Time everything on vectors of `n` elements; collective; rank 0 has the record."""
    with Communicator(topology="ring") as comm, Communicator() as automatic:
        x, out = aligned_empty(n, np.float32, 64), aligned_empty(n, np.float32, 64)
        np.random.default_rng((0, comm.rank)).standard_normal(n, np.float32, out=x)
        aggregators = {name: options.start(comm, n) for name, options in ONE_BIT.items()}
        sides = {
            MPI_ALONE: partial(comm.mpi_comm.Allreduce, x, out),
            "dense ring": partial(comm.allreduce, x, out=out),
            "dense auto": partial(automatic.allreduce, x, out=out),
            **{name: partial(one.aggregate, x, out) for name, one in aggregators.items()},
        }
        timed = alternate(sides, repeats, comm=comm)
        costs = {name: cost(comm, one.traffic.last) for name, one in aggregators.items()}
        facts = environment()
        if comm.rank:
            return None
        alone = summary(timed[MPI_ALONE])
        rows = [
            {
                "way": way,
                **summary(seconds),
                "speedup": alone["median_s"] / float(np.median(seconds)),
                "speedup_of_minima": alone["min_s"] / float(seconds.min()),
                "target": TARGETS.get((way, comm.size), ""),
                "cost": costs.get(way),
            }
            for way, seconds in timed.items()
        ]
    settings = {"ranks": comm.size, "n": n, "repeats": repeats}
    return {"part": "allreduce", "settings": settings, "environment": facts, "rows": rows}


def cost(comm: Communicator, last: Traffic) -> dict[str, float]:
    """Where one call's time went and what it sent, as the mean over ranks; collective."""
    names = ("seconds_encoding", "seconds_merging", "seconds_decoding", "seconds_waiting", "bytes_sent", "messages")
    mine = np.array([float(getattr(last, name)) for name in names])
    return dict(zip(names, gather(comm, mine).mean(axis=0).tolist(), strict=True))


def render(record: Record) -> str:
    """Markdown."""
    columns = (
        "way",
        "median (min), ms",
        "speed-up",
        "of minima",
        "target",
        "encode + merge + decode + wait, ms",
        "MB sent",
    )
    return table(columns, [_cells(row) for row in record["rows"]]) + footer(record)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    spent = row["cost"]
    parts = ("seconds_encoding", "seconds_merging", "seconds_decoding", "seconds_waiting")
    return (
        row["way"],
        both(row, MS),
        f"{row['speedup']:.2f}",
        f"{row['speedup_of_minima']:.2f}",
        row["target"],
        " + ".join(scaled(spent[part], MS) for part in parts) if spent else "",
        f"{spent['bytes_sent'] / 1e6:.3g}" if spent else "",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    mpicomp.install_abort_hook()
    options = parser("allreduce", "All methods against MPI_Allreduce.").parse_args(argv)
    publish(measure(100_000, 3) if options.quick else measure(25_000_000, 25), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
