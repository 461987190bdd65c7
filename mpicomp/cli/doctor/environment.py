"""The Python side: compiled kernels and their cache, threads, packages in each other's way."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from mpicomp.cli.doctor.finding import Finding, examine
from mpicomp.cli.doctor.packages import own_packages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def findings(n_local_ranks: int) -> list[Finding]:
    """Return what is to say of this process's packages and environment, with `n_local_ranks` ranks on this host."""
    return [
        examine("packages", own_packages),
        examine("kernels", kernels, "FAIL"),
        examine("threads", lambda: threads(n_local_ranks, os.environ)),
        examine("pytest_mpi", lambda: pytest_mpi(packages_distributions())),
        examine("torch", torch),
        examine("huge pages", lambda: huge_pages(os.environ, _read(HUGE_PAGES))),
    ]


def kernels() -> Finding:
    """Load all kernels and look into the folders where Numba keeps the compiled ones."""
    try:
        folders = set(_cache_folders())
    except Exception as error:
        if "no locator available" not in str(error):
            raise
        cure = "set NUMBA_CACHE_DIR to a folder that you may write"
        return Finding("kernels", "FAIL", f"Numba {version('numba')} finds no folder for its cache", cure)
    existing = [next(place for place in (folder, *folder.parents) if place.exists()) for folder in folders]
    n_compiled = sum(1 for folder in folders for _ in folder.glob("*.nbc"))
    cure = ""
    if not all(os.access(folder, os.W_OK) for folder in existing):
        cure = "not writable: set NUMBA_CACHE_DIR to a folder that you may write, or every start compiles anew"
    elif not n_compiled:
        cure = "the first calls will compile: run a job once with one rank before you start many"
    text = f"Numba {version('numba')}, {n_compiled} compiled in {', '.join(map(str, sorted(folders)))}"
    return Finding("kernels", "warn" if cure else "ok", text, cure)


def _cache_folders() -> Iterator[Path]:
    package = importlib.import_module("mpicomp.kernels")
    for module in pkgutil.walk_packages(package.__path__, "mpicomp.kernels."):
        if ".cuda" in module.name:
            continue
        for kernel in vars(importlib.import_module(module.name)).values():
            path = getattr(getattr(kernel, "stats", None), "cache_path", None)
            if path is not None:
                yield Path(path)


def threads(n_local_ranks: int, environ: Mapping[str, str]) -> Finding:
    """Look for thread pools that would fight: NumPy's and torch's take every core unless told otherwise."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.endswith("_NUM_THREADS"))
    if n_local_ranks > 1 and "OMP_NUM_THREADS" not in environ:
        text = f"OMP_NUM_THREADS is not set, and {n_local_ranks} ranks are on this host"
        return Finding("threads", "warn", text, "set OMP_NUM_THREADS=1, or the cores of a rank")
    return Finding("threads", "ok", shown or "no limit set")


def pytest_mpi(distributions: Mapping[str, list[str]]) -> Finding:
    """Look for the two packages that install one module; `distributions` maps modules to packages."""
    found = sorted(set(distributions.get("pytest_mpi", ())))
    if set(found) - {"pytest-mpi"}:
        cure = "the tests need pytest-mpi: pip uninstall mpi-pytest, then pip install --force-reinstall pytest-mpi"
        return Finding("pytest_mpi", "warn", f"the module is from {' and '.join(found)}", cure)
    return Finding("pytest_mpi", "ok", found[0] if found else "not installed: needed by the tests only")


def torch() -> Finding:
    """Look for torch without importing it."""
    try:
        return Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        return Finding("torch", "ok", "not installed: mpicomp.torch needs it (pip install 'mpicomp[torch]')")


def huge_pages(environ: Mapping[str, str], offered: str) -> Finding:
    """Look whether torch takes huge pages for large tensors; `offered` is what the kernel says of them."""
    chosen = offered.partition("[")[2].partition("]")[0]
    if chosen == "madvise" and not environ.get("THP_MEM_ALLOC_ENABLE"):
        text = "torch does not ask for them, and new gradients are cleared in pages of 4 kB"
        return Finding("huge pages", "warn", text, "export THP_MEM_ALLOC_ENABLE=1, as slurm/env.sh does")
    return Finding("huge pages", "ok", f"transparent huge pages: {chosen or 'unknown'}")


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
