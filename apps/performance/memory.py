"""Measure the peak memory of an aggregate beyond input, output and residual.

``mpirun -n 2 python -m apps.performance.memory`` shows what Python and NumPy allocate (tracemalloc) and what becomes
resident. The latter is the kernel's peak, which also counts pages of MPI and whole huge pages.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.performance.part import Part, Row, get, make_record, vectors
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.kernel_files import kilobytes
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
    """Look at every method on vectors of `n` elements; collective."""
    with Communicator(topology="ring") as comm:
        x, out = vectors(n, comm)
        rows: list[Row] = []
        for method, options in METHODS.items():
            # Kernels are loaded and MPI's own buffers made before.
            aggregate(options, comm, x[:WARM_UP_ELEMENTS], out[:WARM_UP_ELEMENTS])
            mine = np.array([_resident(options, comm, x, out), _count_allocated(options, comm, x, out)], np.float64)
            resident, allocated = gather(comm, mine).max(axis=0).tolist()
            rows.append({"method": method, "resident": resident, "allocated": allocated, "elements": n})
        return None if comm.rank else make_record(rows, ranks=comm.size, n=n, calls=CALLS)


def aggregate(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    """Start and use an aggregator; bytes of its residual."""
    aggregator = options.start(comm, x.size)
    for _ in range(CALLS):
        aggregator.aggregate(x, out)
    residual = getattr(aggregator, "residual", None)
    return 0 if residual is None else int(residual.nbytes)


def resident_bytes(name: str = "VmRSS") -> int:
    """Memory of this process that is in RAM now, or by "VmHWM" was at most since it began, or since `forget_peak`."""
    return 1024 * kilobytes(Path("/proc/self/status"), name)


def forget_peak() -> None:
    """Let the peak start from the memory that is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Give freed memory back to the system, which glibc alone can: other allocators keep some in their heaps."""
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def _resident(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    give_back()  # the next vectors would hide in freed memory
    forget_peak()
    before = resident_bytes()
    residual = aggregate(options, comm, x, out)
    return resident_bytes("VmHWM") - before - residual


def _count_allocated(options: Algorithm, comm: Communicator, x: NDArray[Any], out: NDArray[Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        residual = aggregate(options, comm, x, out)
        return tracemalloc.get_traced_memory()[1] - before - residual
    finally:
        tracemalloc.stop()


COLUMNS = (
    ("method", get("method")),
    ("allocated, MB", lambda row: f"{row['allocated'] / 1e6:.2f}"),
    ("bytes an element", lambda row: f"{row['allocated'] / row['elements']:.3f}"),
    ("resident, MB", lambda row: f"{row['resident'] / 1e6:.2f}"),
    ("bytes an element", lambda row: f"{row['resident'] / row['elements']:.3f}"),
    ("target", lambda row: "≤ 0.25" if row["method"] != "dense" else ""),
)
PART = Part(
    "memory",
    "Peak memory of an aggregate beyond input, output and residual.",
    measure,
    COLUMNS,
    quick={"n": 500_000},
    full={"n": 25_000_000},
    ranks=(2,),
)

if __name__ == "__main__":
    sys.exit(PART.main())
