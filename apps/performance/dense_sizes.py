"""Time the dense all-reduce against MPI's by vector size: ``mpirun -n 2 python -m apps.performance.dense_sizes``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from apps.performance.durations import summary
from apps.performance.part import US, Part, Row, both, format_seconds, make_record, vectors
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import alternate

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 100_000_000,
         400_000_000)  # fmt: skip
SECONDS_A_SIZE = 12.0  # about as long as each size is measured
FROM_HERE_RATIO = 256 * KIB  # below, the target is a difference
RING_FROM = 4 * MIB


def repeats_for(nbytes: int) -> int:
    """Return the number of calls of each of three all-reduces, at a guessed GB/s and 50 us a call."""
    return max(11, min(2000, int(SECONDS_A_SIZE / (3 * (nbytes / 1e9 + 50e-6)))))


def measure(sizes: Sequence[int], most_repeats: int) -> Record | None:
    """Time every size; collective."""
    rows: list[Row] = []
    with Communicator(topology="ring") as comm, Communicator() as automatic:
        for nbytes in sizes:
            x, out = vectors(nbytes // 4, comm)
            calls = {
                "mpi": partial(comm.mpi_comm.Allreduce, x, out),
                "auto": partial(automatic.allreduce, x, out=out),
                "ring": partial(comm.allreduce, x, out=out),
            }
            repeats = min(most_repeats, repeats_for(nbytes))
            timed = {name: summary(seconds) for name, seconds in alternate(calls, repeats, comm=comm).items()}
            rows.append({"nbytes": nbytes, "repeats": repeats, **timed})
        return None if comm.rank else make_record(rows, ranks=comm.size, repeats=f"up to {most_repeats}")


def _times_faster(row: Row, name: str) -> str:
    return f"{row['mpi']['median_s'] / row[name]['median_s']:.2f}"


COLUMNS = (
    ("bytes", lambda row: f"{row['nbytes']:,}"),
    ("MPI_Allreduce, µs", lambda row: both(row["mpi"], US)),
    ("auto, µs", lambda row: both(row["auto"], US)),
    ("beyond MPI, µs", lambda row: format_seconds(row["auto"]["median_s"] - row["mpi"]["median_s"], US)),
    ("speed-up", lambda row: _times_faster(row, "auto")),
    ("target", lambda row: "≥ 0.95" if row["nbytes"] >= FROM_HERE_RATIO else "≤ 25 µs beyond"),
    ("ring, µs", lambda row: both(row["ring"], US)),
    ("its speed-up", lambda row: _times_faster(row, "ring")),
    ("target", lambda row: "≥ 1.0" if row["nbytes"] >= RING_FROM else ""),
)
PART = Part(
    "dense_sizes",
    "The dense all-reduce against MPI's, by size.",
    measure,
    COLUMNS,
    quick={"sizes": (4 * KIB, 256 * KIB), "most_repeats": 3},
    full={"sizes": SIZES, "most_repeats": 2000},
    ranks=(2,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
