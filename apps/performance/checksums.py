"""Measure the cost of checksums: sums with and without them, alternating, over memory and over an emulated link.

``mpirun -n 2 python -m apps.performance.checksums``
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from mpi4py import MPI

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import MS, Column, Part, Row, both, make_record, vectors
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import Calls, alternate

LINKS = (None, "1gbit")
LENGTHS = (1 << 10, 1 << 14, 1 << 18, 25_000_000)  # 4 KiB to 100 MB
LONG = 1 << 20  # elements from which a call takes long enough for few rounds


def measure(repeats: int, longest: int) -> Record | None:
    """Time sums with checksums and without; collective."""
    rows: list[Row] = []
    with ExitStack() as stack:
        for link in LINKS:
            comms = {
                name: stack.enter_context(Communicator(link=link, topology="ring", checksums=name == "with"))
                for name in ("with", "without")
            }
            comm = comms["with"]
            for n in (n for n in LENGTHS if n <= longest):
                x, out = vectors(n, comm)
                dense: Calls = {name: partial(one.allreduce, x, out=out) for name, one in comms.items()}
                aggregators = {name: mpicomp.Marsit(None).start(one, n) for name, one in comms.items()}
                marsit: Calls = {name: partial(one.aggregate, x, out) for name, one in aggregators.items()}
                for method, calls in (("dense", dense), ("Marsit", marsit)):
                    rounds = max(3, repeats // 20) if n > LONG else repeats
                    timed = {name: summary(times) for name, times in alternate(calls, rounds, 2, comm).items()}
                    rows.append({"method": method, "link": link or "memory", "count": n, **timed})
    world = MPI.COMM_WORLD
    return None if world.rank else make_record(rows, ranks=world.size, repeats=repeats)


COLUMNS: Sequence[Column] = (
    ("over", lambda row: row["link"]),
    ("elements", lambda row: f"{row['count']:,}"),
    ("method", lambda row: row["method"]),
    ("with, ms", lambda row: both(row["with"], MS)),
    ("without, ms", lambda row: both(row["without"], MS)),
    ("ratio of medians", lambda row: f"{row['with']['median_s'] / row['without']['median_s']:.3f}"),
)
PART = Part(
    "checksums",
    "Cost of checksums.",
    measure,
    COLUMNS,
    quick={"repeats": 10, "longest": 1 << 14},
    full={"repeats": 200, "longest": 25_000_000},
    ranks=(2, 4),
)

if __name__ == "__main__":
    sys.exit(PART.main())
