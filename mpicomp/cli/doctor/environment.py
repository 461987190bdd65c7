"""Findings about this process: compiled kernels, threads, limits of a container, packages that conflict with ours."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import platform
import tempfile
import warnings
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distributions, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path, PurePath

from mpicomp.cli.doctor.finding import Finding, examine

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LIMITS = "trim_threshold", "mmap_threshold"  # of glibc
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def findings(n_local_ranks: int, usable_cores: int) -> list[Finding]:
    """Return the findings about this process, one of `n_local_ranks` on this host, which may use so many cores."""
    host_cores = min(float(usable_cores), quota())
    return [
        examine("packages", own_packages),
        examine("kernels", kernels, "FAIL"),
        examine("threads", lambda: threads(n_local_ranks, os.environ, len(os.sched_getaffinity(0)), host_cores)),
        examine("pytest_mpi", lambda: pytest_mpi(packages_distributions())),
        examine("torch", torch),
        examine("huge pages", lambda: huge_pages(os.environ, _text(HUGE_PAGES))),
        examine("freed memory", lambda: freed_memory(os.environ, platform.libc_ver()[0])),
    ]


def kernels() -> Finding:
    """Load all kernels, and check the folder of the compiled ones."""
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
    """Check that the ranks of this host, which use `host_cores` at once, start no more threads than there are cores."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(environ.items()) if name.endswith("_NUM_THREADS"))
    limits = [environ.get(name, "").partition(",")[0] for name in POOLS]
    set_to = max((int(limit) for limit in limits if limit.isdecimal()), default=0)
    # thread pools of NumPy and torch take every core unless they are limited
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
    """Check which of two packages has installed the module; `distributions` maps modules to packages."""
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
        return Finding("torch", "ok", "not installed: mpicomp.torch needs it (pip install torch)")


def huge_pages(environ: Mapping[str, str], offered: str) -> Finding:
    """Check whether torch takes huge pages for large tensors; `offered` is the kernel's setting."""
    chosen = offered.partition("[")[2].partition("]")[0]
    if chosen == "madvise" and not environ.get("THP_MEM_ALLOC_ENABLE"):
        text = "torch does not request them, and new gradients are cleared in pages of 4 kB"
        return Finding("huge pages", "warn", text, "start it by mpicomp run, or export THP_MEM_ALLOC_ENABLE=1")
    return Finding("huge pages", "ok", f"transparent huge pages: {chosen or 'unknown'}")


def freed_memory(environ: Mapping[str, str], libc: str) -> Finding:
    """Check whether the process keeps memory that PyTorch frees in every step; `libc` is the C library."""
    if libc != "glibc" or any(name in environ.get("LD_PRELOAD", "") for name in ("jemalloc", "tcmalloc", "mimalloc")):
        return Finding("freed memory", "ok", "the allocator is not that of glibc")
    # Either one alone ends the adaptation of the other limit, which stays at 128 KiB.
    tuned = environ.get("GLIBC_TUNABLES", "")
    if not all(environ.get(f"MALLOC_{name.upper()}_") or f"malloc.{name}" in tuned for name in LIMITS):
        text = "glibc may return it to the system in every step, which clears it again"
        cure = "start it by mpicomp run, or export MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432"
        return Finding("freed memory", "warn", text, cure)
    return Finding("freed memory", "ok", "the process keeps it")


# Packages of the same name -------------------------------------------------------------------------------------------


OURS = ("collectives", "mpicomp")
MOST_NAMED = 3
_HOME = Path(__file__).resolve().parents[3]  # of the packages that this file belongs to
_AGAIN = "pip install --force-reinstall --no-deps mpicomp, best in an environment of its own"


def own_packages(home: Path = _HOME, installed: Iterable[Distribution] | None = None) -> Finding:
    """Check that `collectives` lies next to `mpicomp`, in `home`, and that the files are those that were installed."""
    everything = list(distributions() if installed is None else installed)
    spec = find_spec("collectives")
    found = None if spec is None else _folder(spec.origin, spec.submodule_search_locations)
    if found != home / "collectives":
        owners = _owners(everything, [found / "__init__.py"]) if found else []
        text = f"collectives is imported from {found}, which is not ours: that is {home / 'collectives'}"
        return Finding("packages", "FAIL", text, _cure(owners, "look for it in PYTHONPATH and the current folder"))
    # a distribution's RECORD has a hash of every file; an editable installation or a checkout has no hashes
    recorded = [
        one for one in everything if _name(one) == "mpicomp" and Path(str(one.locate_file(""))).resolve() == home
    ]
    altered = [path for one in recorded for path in _altered(one)]
    if altered:
        named = ", ".join(str(path.relative_to(home)) for path in altered[:MOST_NAMED])
        more = f" and {len(altered) - MOST_NAMED} more" if len(altered) > MOST_NAMED else ""
        text = f"files are not those that mpicomp has installed: {named}{more}"
        return Finding("packages", "warn", text, _cure(_owners(everything, altered), _AGAIN))
    return Finding("packages", "ok", f"collectives and mpicomp are ours, in {home}")


def _folder(origin: str | None, locations: Iterable[str] | None) -> Path | None:
    """Return the folder of a package; without an ``__init__.py`` it has only locations."""
    places = [str(Path(origin).parent)] if origin else list(locations or ())
    return Path(places[0]).resolve() if places else None


def _altered(installed: Distribution) -> Iterator[Path]:
    """Yield our modules whose bytes differ from the RECORD, or that are missing."""
    for file in installed.files or ():
        if file.parts[0] in OURS and file.suffix == ".py" and file.hash is not None:
            path = _place(installed, file)
            if not path.exists() or _digest(path, file.hash.mode) != file.hash.value:
                yield path


def _place(installed: Distribution, file: PurePath | str) -> Path:
    return Path(str(installed.locate_file(str(file)))).resolve()


def _digest(path: Path, algorithm: str) -> str:
    """Return the hash of a file in the form of a RECORD."""
    return urlsafe_b64encode(hashlib.new(algorithm, path.read_bytes()).digest()).decode().rstrip("=")


def _owners(installed: Iterable[Distribution], paths: Iterable[Path]) -> list[str]:
    """Return the names of other distributions that have installed one of these files."""
    wanted = {path.resolve() for path in paths}
    names = {path.name for path in wanted}
    return sorted(
        {
            f"{_name(one)} {one.version}"
            for one in installed
            if _name(one) != "mpicomp"
            for file in one.files or ()
            if file.name in names and _place(one, file) in wanted
        }
    )


def _name(installed: Distribution) -> str:
    return str(installed.metadata["Name"])


def _cure(owners: list[str], otherwise: str) -> str:
    if not owners:
        return otherwise
    return f"pip uninstall {' '.join(owner.split()[0] for owner in owners)} ({', '.join(owners)}), then {_AGAIN}"


# Containers ----------------------------------------------------------------------------------------------------------


ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def quota(root: Path = ROOT, own: Path = OWN) -> float:
    """Return the number of cores whose time this container may use; infinity without a limit."""
    found = [_limit(place / "cpu.max") for place in _places(root, own, "")]
    found += [
        _ratio(_text(place / "cpu.cfs_quota_us"), _text(place / "cpu.cfs_period_us"))
        for place in _places(root, own, "cpu")
    ]
    return min(found, default=math.inf)


def memory_limit(root: Path = ROOT, own: Path = OWN, left: bool = False) -> float:
    """Return the bytes that this container may use, or with `left` those that it does not use yet; or infinity."""
    names = {"": ("memory.max", "memory.current"), "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}
    return min(
        (
            int(limit) - (int(_text(place / used) or 0) if left else 0)
            for version, (most, used) in names.items()
            for place in _places(root, own, version)
            if (limit := _text(place / most)).isdecimal()
        ),
        default=math.inf,
    )


def _places(root: Path, own: Path, controller: str) -> list[Path]:
    """Return the folders of this process's groups under a controller; "" stands for the second version."""
    lines = (line.split(":", 2) for line in _text(own).splitlines() if line.count(":") > 1)
    return [
        place for _, names, path in lines if controller in names.split(",") for place in _up(root / controller, path)
    ]


def _up(root: Path, path: str) -> list[Path]:
    """Return the folders of a group and of the groups around it that are visible in this container."""
    inner = root / path.lstrip("/")
    return [place for place in (inner, *inner.parents) if place.is_relative_to(root)]


def _limit(file: Path) -> float:
    limit, _, period = _text(file).partition(" ")
    return _ratio(limit, period)


def _ratio(limit: str, period: str) -> float:
    is_limited = limit.isdecimal() and period.isdecimal() and int(limit) and int(period)
    return int(limit) / int(period) if is_limited else math.inf


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except (OSError, ValueError):  # a null byte in a group's path is a ValueError
        return ""


_CURE = "give the container more (docker run --shm-size=1g), or set OMPI_MCA_btl_sm_backing_directory=/tmp"
SHARED_MEMORY = Path("/dev/shm")
SEGMENT_BYTES = 16 << 20  # that Open MPI takes for each rank of a host


def obstacles(environ: Mapping[str, str], folder: Path = SHARED_MEMORY) -> list[Finding]:
    """Return the obstacles to the start of MPI."""
    found = []
    if not environ.get("HOME"):
        text = "HOME is not set, without which Open MPI does not start"
        found.append(Finding("home", "warn", text, "export HOME=/tmp, or another folder that you may write"))
    found += _temporary_folder(environ)
    ranks = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    needed = SEGMENT_BYTES * (int(ranks) if ranks.isdecimal() else 1)
    backing = Path(environ.get("OMPI_MCA_btl_sm_backing_directory", folder))
    try:
        status = os.statvfs(backing)
    except OSError as error:
        found.append(Finding("shared memory", "warn", f"{backing} cannot be used ({error.strerror})", _CURE))
        return found
    free = status.f_bavail * status.f_frsize
    if free < needed:
        text = f"{backing} has room for {free >> 20} MiB, and Open MPI takes {needed >> 20} MiB for the ranks of a host"
        found.append(Finding("shared memory", "warn", text, _CURE))
    return found


def _temporary_folder(environ: Mapping[str, str]) -> list[Finding]:
    """Return a finding if the folder takes no files: launchers then fail, and processes without a launcher crash."""
    name = next(filter(environ.get, ("TMPDIR", "TEMP", "TMP")), "")
    folder = Path(environ.get(name, "/tmp"))
    try:
        # Open MPI makes the folder if it can
        with tempfile.TemporaryFile(dir=next(one for one in (folder, *folder.parents) if one.exists())) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        text = f"{name and name + '='}{folder} takes no files ({error.strerror}), without which Open MPI does not start"
        cure = "export TMPDIR=/tmp, or another folder that you may write and that has room"
        return [Finding("temporary files", "warn", text, cure)]
    return []
