"""What a measurement was made on."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SCALING_ELEMENTS, _SCALING_TURNS, _SCALING_S = 1 << 24, 5, 0.05


def machine_facts() -> dict[str, Any]:
    """Processor, memory pages, libraries. Call it while the vectors exist: their pages are counted.

    Returns
    -------
    dict
        JSON-able; `describe` makes a sentence of it.
    """
    # Initialises MPI, which a program without ranks should do no earlier than it must.
    from mpi4py import MPI

    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0\n "),
        "huge_pages": huge_page_policy(_PAGES.read_text() if _PAGES.exists() else ""),
        "huge_mb": _kilobytes(Path("/proc/self/smaps_rollup"), "AnonHugePages") * 1024 / 1e6,
        "resident_mb": _kilobytes(Path("/proc/self/status"), "VmRSS") * 1024 / 1e6,
        "load": round(os.getloadavg()[0], 2),
    }


def describe(facts: dict[str, Any]) -> str:
    """One sentence."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}, {facts['mpi']}, NumPy {facts['numpy']}, "
        f"Numba {facts['numba']}, Python {facts['python']}; huge pages: {facts['huge_pages']}, "
        f"{facts['huge_mb']:.0f} of {facts['resident_mb']:.0f} MB resident on them; load {facts['load']:.1f}"
    )


def memory_scaling() -> float:
    """How many times as fast as one processor all of them read memory at once; on a quiet machine, in half a second.

    Processors that share a way to memory reach little more together than one alone. Which ones a virtual machine has
    can change while it runs.
    """
    vectors = [np.ones(_SCALING_ELEMENTS, np.float32) for _ in range(len(os.sched_getaffinity(0)))]
    reached = [(passes(vectors[:1]), passes(vectors)) for _ in range(_SCALING_TURNS)]
    return float(np.median([together / alone for alone, together in reached]))


def passes(vectors: list[NDArray[np.float32]]) -> float:
    """How often a second threads read the vectors, one each."""
    done = [0] * len(vectors)
    end = time.perf_counter() + _SCALING_S

    def read(mine: int) -> None:
        while not done[mine] or time.perf_counter() < end:  # once at least, where starting took as long
            vectors[mine].max()  # without Python's lock
            done[mine] += 1

    threads = [threading.Thread(target=read, args=(mine,)) for mine in range(len(vectors))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - start)


def huge_page_policy(text: str) -> str:
    """The chosen word of ``always [madvise] never``."""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "none"


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return 1024 * _kilobytes(Path("/proc/self/status"), "VmRSS")


def peak_resident_bytes() -> int:
    """The most since the process began, or since `forget_peak`."""
    return 1024 * _kilobytes(Path("/proc/self/status"), "VmHWM")


def forget_peak() -> None:
    """Let the peak start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def release_free_memory() -> None:
    """Let the C library give back what was freed, or the next vectors would hide in it; glibc alone can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _field(path: Path, name: str) -> str:
    """The value behind ``name:`` in a file of the kernel's; empty if there is none."""
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1].strip() if found else ""


def _kilobytes(path: Path, name: str) -> int:
    return int(_field(path, name).removesuffix("kB") or 0)
