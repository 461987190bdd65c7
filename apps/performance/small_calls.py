"""What a small call costs beyond MPI and beyond its kernels: ``mpirun -n 2 python -m apps.performance.small_calls``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import mpicomp
from apps.environment import environment
from apps.performance.record import both, footer, parser, publish, scaled, table
from apps.records import Record
from collectives import Communicator
from collectives.memory import aligned_empty
from mpicomp.cli.timing import Calls, alternate, summary
from mpicomp.codecs.sign import mix_words, scratch
from mpicomp.kernels.cpu.philox import merge_words
from mpicomp.kernels.cpu.sign import BLOCK, encode, pack, unpack
from mpicomp.kernels.streams import GROUP, Stream, source

US = 1e-6
COUNTS = (1, 16, 256, 1024, 4096, 16_384, 65_536)


def kernels(n: int, size: int, compensation: bool) -> Callable[[], None]:
    """What one rank of `size` calls for one one-bit all-reduce of `n` elements, one after the other.

    Encoding and decoding of all elements, and one merge of (size - 1) / size of them: the least that any schedule does.
    A schedule that merges more has it counted as its overhead.
    """
    x, out = np.ones(n, np.float32), np.empty(n, np.uint32)
    residual, sums = np.zeros(n, np.float32), np.zeros(-(-n // BLOCK))
    bits, others = np.zeros(-(-n // 64), np.uint64), np.zeros(-(-n // 64), np.uint64)
    merged = bits[: -(-bits.size * (size - 1) // size)]
    words, work = np.empty(-(-merged.size * 64 // GROUP) * 8, np.uint64), scratch()
    schedule, step, origin = Stream(0, 0, "merge").schedule(), np.uint64(1), source(0)
    zero, one = np.float32(0), np.float32(1)
    tiny = np.nextafter(zero, one)
    positive, negative = np.array([1, -1], np.float32).view(np.uint32)

    def call() -> None:
        if compensation:
            encode(x, residual, bits, one, one, None, True, zero, tiny, sums)
        else:
            pack(x, bits, True, zero, tiny)
        if size > 1:
            mix_words(schedule, (0, step, origin), (1, 1), work, words)
            merge_words(words, others[: merged.size], merged)
        unpack(bits, positive, negative, False, out)

    return call


def measure(counts: Sequence[int], repeats: int) -> Record | None:
    """Time every vector length; collective; rank 0 has the record."""
    rows: list[dict[str, Any]] = []
    with Communicator() as comm:
        for n in counts:
            x, out = aligned_empty(n, np.float32, 64), aligned_empty(n, np.float32, 64)
            np.random.default_rng((0, comm.rank)).standard_normal(n, np.float32, out=x)
            bare = mpicomp.Marsit(None, compensation=False, global_step=1.0).start(comm, n)
            own = mpicomp.Marsit(None).start(comm, n)
            sides: Calls = {
                "mpi": partial(comm.mpi_comm.Allreduce, x, out),
                "auto": partial(comm.allreduce, x, out=out),
                "bare": partial(bare.aggregate, x, out),
                "bare_kernels": kernels(n, comm.size, compensation=False),
                "own": partial(own.aggregate, x, out),
                "own_kernels": kernels(n, comm.size, compensation=True),
            }
            timed = {way: summary(seconds) for way, seconds in alternate(sides, repeats, 20, comm).items()}
            rows.append({"count": n, **timed})
        facts = environment()
        settings = {"ranks": comm.size, "repeats": repeats}
        return None if comm.rank else {"part": "small-calls", "settings": settings, "environment": facts, "rows": rows}


def render(record: Record) -> str:
    """Markdown."""
    columns = (
        "elements", "MPI_Allreduce, µs", "allreduce, µs", "beyond MPI", "one-bit alone, µs", "its kernels", "beyond",
        'Marsit "own", µs', "its kernels", "beyond", "target",
    )  # fmt: skip
    rows = [
        (
            f"{row['count']:,}",
            both(row["mpi"], US),
            both(row["auto"], US),
            _beyond(row["auto"], row["mpi"]),
            both(row["bare"], US),
            scaled(row["bare_kernels"]["median_s"], US),
            _beyond(row["bare"], row["bare_kernels"]),
            both(row["own"], US),
            scaled(row["own_kernels"]["median_s"], US),
            _beyond(row["own"], row["own_kernels"]),
            "each beyond ≤ 25",
        )
        for row in record["rows"]
    ]
    return table(columns, rows) + footer(record)


def _beyond(call: dict[str, float], part: dict[str, float]) -> str:
    """Of the medians, and of the minima."""
    return both({key: call[key] - part[key] for key in ("median_s", "min_s")}, US)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    mpicomp.install_abort_hook()
    options = parser("small_calls", "What a small call costs beyond MPI and its kernels.").parse_args(argv)
    publish(measure(COUNTS[:2], 20) if options.quick else measure(COUNTS, 3000), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
