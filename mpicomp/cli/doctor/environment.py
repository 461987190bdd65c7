"""The Python side: compiled kernels and their cache, threads, packages in each other's way."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

from mpicomp.cli.doctor import cores
from mpicomp.cli.doctor.finding import Finding, examine
from mpicomp.cli.doctor.packages import own_packages

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def findings(n_local_ranks: int, usable_cores: int) -> list[Finding]:
    """Return the findings about this process's packages and environment.

    n_local_ranks, usable_cores : ranks on this host, and the cores that one of them or another may run on.
    """
    host_cores = min(float(usable_cores), cores.quota())
    return [
        examine("packages", own_packages),
        examine("kernels", kernels, "FAIL"),
        examine("threads", lambda: threads(n_local_ranks, os.environ, len(os.sched_getaffinity(0)), host_cores)),
        examine("pytest_mpi", lambda: pytest_mpi(packages_distributions())),
        examine("torch", torch),
        examine("huge pages", lambda: huge_pages(os.environ, _read(HUGE_PAGES))),
    ]


def kernels() -> Finding:
    """Load all kernels and look for the folder of the compiled ones."""
    importlib.import_module("mpicomp.kernels").of("cpu")
    cache = importlib.import_module("mpicomp.kernels.cache_folder").CACHE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        to_write = cache.to_write()
    cure = ""
    if cache.problem:
        kept = f"they are kept in {to_write.parent}" if to_write else "every process compiles them again"
        cure = f"{cache.problem}, and {kept}: set NUMBA_CACHE_DIR to a folder that you may write and that has room"
    elif not cache.count():
        cure = "the first calls will compile: run 'mpicomp warm' once"
    text = f"Numba {version('numba')}, {cache.count()} compiled in {cache.folder}"
    return Finding("kernels", "warn" if cure else "ok", text, cure)


def threads(n_local_ranks: int, environ: Mapping[str, str], own_cores: int, host_cores: float) -> Finding:
    """Look for thread pools that would fight: NumPy's and torch's take every core unless they are limited.

    own_cores, host_cores : that this rank may run on, and that all ranks of this host may use at once.
    """
    shown = ", ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.endswith("_NUM_THREADS"))
    limits = [environ.get(name, "").partition(",")[0] for name in POOLS]
    set_to = max((int(limit) for limit in limits if limit.isdecimal()), default=0)
    n_threads = set_to or own_cores
    if n_threads > 1 and (n_threads > own_cores or n_threads * n_local_ranks > host_cores):
        ranks = f"each of {n_local_ranks} ranks" if n_local_ranks > 1 else "the rank"
        text = f"{shown or 'no limit set'}: {ranks} may start {n_threads} threads, and there are {host_cores:g} cores"
        if own_cores < host_cores:
            text += f", {own_cores} of them for a rank"
        fair = max(1, int(min(own_cores, host_cores / n_local_ranks)))
        return Finding("threads", "warn", text, f"set OMP_NUM_THREADS={fair}")
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
