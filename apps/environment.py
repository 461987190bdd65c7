"""Describe the machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mpicomp.cli.kernel_files import cpu_name, kilobytes

_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def environment() -> dict[str, Any]:
    """Processor, memory pages and libraries, for a record. Call it while the vectors exist: their pages are counted."""
    # Initialises MPI, which a program without ranks should do no earlier than it must.
    from mpi4py import MPI

    return {
        "cpu": cpu_name(),
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
