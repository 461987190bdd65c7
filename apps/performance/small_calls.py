"""Measure the cost of a small call beyond MPI and beyond its kernels.

``mpirun -n 2 python -m apps.performance.small_calls``
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.performance.durations import summary
from apps.performance.part import US, Column, Part, Row, both, format_seconds, make_record, vectors
from apps.records import Record
from collectives import Communicator
from mpicomp.cli.timing import Calls, alternate
from mpicomp.codecs import Sign
from mpicomp.kernels.cpu.sign import encode, pack, unpack
from mpicomp.kernels.streams import BLOCK, GROUP, Stream, source

COUNTS = (1, 16, 256, 1024, 4096, 16_384, 65_536)


def kernels(n: int, size: int, compensation: bool) -> Callable[[], None]:
    """Return the kernels that a rank of `size` calls for a one-bit all-reduce of `n` elements, one after the other."""
    x, out = np.ones(n, np.float32), np.empty(n, np.uint32)
    residual, sums = np.zeros(n, np.float32), np.zeros(-(-n // BLOCK))
    bits, others = np.zeros(-(-n // 64), np.uint64), np.zeros(-(-n // 64), np.uint64)
    # all elements are encoded and decoded, and (size - 1) / size of them merged once: the least that any schedule does;
    # further merges of a schedule are overhead
    merged = bits[: -(-bits.size * (size - 1) // size)]
    words, sign = np.empty(-(-merged.size * 64 // GROUP) * 8, np.uint64), Sign().bind("cpu", Stream(0, 0, "merge"))
    origin = source(0)
    zero, one = np.float32(0), np.float32(1)
    tiny = np.nextafter(zero, one)
    positive, negative = np.array([1, -1], np.float32).view(np.uint32)

    def call() -> None:
        if compensation:
            encode(x, None, residual, residual, bits, one, one, None, True, zero, tiny, sums)
        else:
            pack(x, bits, True, zero, tiny)
        if size > 1:
            sign.draw(0, 1, origin, (1, 1), words)
            sign.merge(words, others[: merged.size], merged)
        unpack(bits, positive, negative, False, out)

    return call


def measure(counts: Sequence[int], repeats: int) -> Record | None:
    """Time every vector length; collective."""
    rows: list[Row] = []
    with Communicator() as comm:
        for n in counts:
            x, out = vectors(n, comm)
            bare = mpicomp.Marsit(None, compensation=False, global_step=1.0).start(comm, n)
            own = mpicomp.Marsit(None).start(comm, n)
            calls: Calls = {
                "mpi": partial(comm.mpi_comm.Allreduce, x, out),
                "auto": partial(comm.allreduce, x, out=out),
                "background": partial(_begin_and_wait, comm, x, out),
                "bare": partial(bare.aggregate, x, out),
                "bare_kernels": kernels(n, comm.size, compensation=False),
                "own": partial(own.aggregate, x, out),
                "own_kernels": kernels(n, comm.size, compensation=True),
            }
            timed = {name: summary(seconds) for name, seconds in alternate(calls, repeats, 20, comm).items()}
            rows.append({"count": n, **timed})
        return None if comm.rank else make_record(rows, ranks=comm.size, repeats=repeats)


def _begin_and_wait(comm: Communicator, x: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    comm.iallreduce(x, out=out).wait()


def _beyond(call: str, part: str) -> Column:
    """Difference of the medians, and of the minima."""
    return (
        "beyond MPI" if part == "mpi" else "beyond",
        lambda row: both({key: row[call][key] - row[part][key] for key in ("median_s", "min_s")}, US),
    )


COLUMNS: Sequence[Column] = (
    ("elements", lambda row: f"{row['count']:,}"),
    ("MPI_Allreduce, µs", lambda row: both(row["mpi"], US)),
    ("allreduce, µs", lambda row: both(row["auto"], US)),
    _beyond("auto", "mpi"),
    ("iallreduce, µs", lambda row: both(row["background"], US) if "background" in row else ""),
    ("one-bit alone, µs", lambda row: both(row["bare"], US)),
    ("its kernels", lambda row: format_seconds(row["bare_kernels"]["median_s"], US)),
    _beyond("bare", "bare_kernels"),
    ('Marsit "own", µs', lambda row: both(row["own"], US)),
    ("its kernels", lambda row: format_seconds(row["own_kernels"]["median_s"], US)),
    _beyond("own", "own_kernels"),
    ("target", lambda row: "each beyond ≤ 25"),
)
PART = Part(
    "small_calls",
    "What a small call costs beyond MPI and its kernels.",
    measure,
    COLUMNS,
    quick={"counts": COUNTS[:2], "repeats": 20},
    full={"counts": COUNTS, "repeats": 3000},
    ranks=(1, 2),
)

if __name__ == "__main__":
    sys.exit(PART.main())
