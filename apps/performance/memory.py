"""Peak memory of an aggregate beyond input, output and residual: ``mpirun -n 2 python -m apps.performance.memory``.

Two ways to see it: what Python and NumPy allocate (tracemalloc), and what becomes resident (the kernel's peak, which
counts pages of MPI's and whole huge pages too).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.environment import environment, kilobytes
from apps.performance.record import footer, parser, publish, table
from apps.records import Record
from collectives import Communicator
from collectives.memory import aligned_empty
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import gather

METHODS: dict[str, Algorithm] = {
    "one-bit alone": mpicomp.Marsit(None, compensation=False, global_step=1.0),
    'Marsit, residual "own"': mpicomp.Marsit(None),
    'Marsit, residual "paper"': mpicomp.Marsit(None, residual="paper"),
    "Marsit, K = 2": mpicomp.Marsit(2),
    "dense": mpicomp.Dense(),
}
CALLS = 3  # full-precision and one-bit rounds of K = 2 both
WARM_UP_ELEMENTS = 1 << 20


def measure(n: int) -> Record | None:
    """Look at every method on vectors of `n` elements; collective; rank 0 has the record."""
    with Communicator(topology="ring") as comm:
        x, out = aligned_empty(n, np.float32, 64), aligned_empty(n, np.float32, 64)
        np.random.default_rng((0, comm.rank)).standard_normal(n, np.float32, out=x)
        out.fill(0)
        rows: list[dict[str, Any]] = []
        for method, options in METHODS.items():
            # Kernels are loaded and MPI's own buffers made before.
            aggregate(options, comm, x[:WARM_UP_ELEMENTS], out[:WARM_UP_ELEMENTS])
            mine = np.array([_resident(options, comm, x, out), _allocated(options, comm, x, out)], np.float64)
            resident, allocated = gather(comm, mine).max(axis=0).tolist()
            target = "≤ 0.25" if method != "dense" else ""
            rows.append({"method": method, "resident": resident, "allocated": allocated, "target": target})
        facts = environment()
        settings = {"ranks": comm.size, "n": n, "calls": CALLS}
        return None if comm.rank else {"part": "memory", "settings": settings, "environment": facts, "rows": rows}


def aggregate(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    """Start and use an aggregator; bytes of its residual."""
    aggregator = options.start(comm, x.size)
    for _ in range(CALLS):
        aggregator.aggregate(x, out)
    residual = getattr(aggregator, "residual", None)
    return 0 if residual is None else int(residual.nbytes)


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return 1024 * kilobytes(Path("/proc/self/status"), "VmRSS")


def peak_resident_bytes() -> int:
    """The most since the process began, or since `forget_peak`."""
    return 1024 * kilobytes(Path("/proc/self/status"), "VmHWM")


def forget_peak() -> None:
    """Let the peak start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def release_free_memory() -> None:
    """Let the C library give back what was freed, or the next vectors would hide in it; glibc alone can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    gc.collect()
    release_free_memory()
    forget_peak()
    before = resident_bytes()
    residual = aggregate(options, comm, x, out)
    return peak_resident_bytes() - before - residual


def _allocated(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        residual = aggregate(options, comm, x, out)
        return tracemalloc.get_traced_memory()[1] - before - residual
    finally:
        tracemalloc.stop()


def render(record: Record) -> str:
    """Markdown."""
    n = record["settings"]["n"]
    rows = [
        (
            row["method"],
            f"{row['allocated'] / 1e6:.2f}",
            f"{row['allocated'] / n:.3f}",
            f"{row['resident'] / 1e6:.2f}",
            f"{row['resident'] / n:.3f}",
            row["target"],
        )
        for row in record["rows"]
    ]
    columns = ("method", "allocated, MB", "bytes an element", "resident, MB", "bytes an element", "target")
    return table(columns, rows) + footer(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    mpicomp.install_abort_hook()
    options = parser("memory", "Peak memory of an aggregate beyond input, output and residual.").parse_args(argv)
    publish(measure(500_000 if options.quick else 25_000_000), render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
