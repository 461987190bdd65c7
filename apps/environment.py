"""Describe the machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, Any]:
    """Processor, memory pages and libraries, for a record. Call it while the vectors exist: their pages are counted."""
    # Initialises MPI, which a program without ranks should do no earlier than it must.
    from mpi4py import MPI

    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "mpi": mpi_library(MPI.Get_library_version()),
        "huge_pages": huge_page_policy(_PAGES.read_text() if _PAGES.exists() else ""),
        "huge_mb": kilobytes(Path("/proc/self/smaps_rollup"), "AnonHugePages") * 1024 / 1e6,
        "resident_mb": kilobytes(Path("/proc/self/status"), "VmRSS") * 1024 / 1e6,
        "load": round(os.getloadavg()[0], 2),
    }


def describe(found: dict[str, Any]) -> str:
    """Describe the result of `environment` in one sentence."""
    return (
        f"{found['cpu']}, {found['cores']} cores, {found['system']}, {found['mpi']}, NumPy {found['numpy']}, "
        f"Numba {found['numba']}, Python {found['python']}; huge pages: {found['huge_pages']}, "
        f"{found['huge_mb']:.0f} of {found['resident_mb']:.0f} MB resident on them; load {found['load']:.1f}"
    )


def huge_page_policy(text: str) -> str:
    """The chosen word of ``always [madvise] never``."""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else "none"


def mpi_library(text: str) -> str:
    """Name and version: Open MPI's text goes on behind a comma, MPICH's over a page."""
    return " ".join(text.strip("\0\n ").splitlines()[0].partition(",")[0].replace("Version:", "").split())


def _field(path: Path, name: str) -> str:
    """The value behind ``name:`` in a file of the kernel's; empty if it is missing."""
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1].strip() if found else ""


def kilobytes(path: Path, name: str) -> int:
    """The value behind ``name:`` in a file of the kernel, in kB; 0 if the kernel does not report it."""
    return int(_field(path, name).removesuffix("kB") or 0)
