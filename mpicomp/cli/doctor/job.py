"""The job: how many ranks on which hosts, and whether messages pass between them."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpicomp.cli.doctor.finding import Finding, Status

if TYPE_CHECKING:
    from mpi4py import MPI

MESSAGE_BYTES = 1 << 20
# Requests past their deadline and their buffers: MPI may write them as long as the process lives.
_abandoned: list[tuple[object, ...]] = []


class Place(NamedTuple):
    """Where one rank runs and on what."""

    host: str
    cores: frozenset[int]
    host_cores: int
    versions: Mapping[str, str]


def here(library: str) -> Place:
    """Return this rank's place; `library` names its MPI library."""
    versions = {name: _version(name) for name in ("mpicomp", "numpy", "numba")}
    versions |= {"Python": platform.python_version(), "MPI": library}
    cores = frozenset(os.sched_getaffinity(0))
    return Place(platform.node(), cores, os.cpu_count() or len(cores), versions)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def launcher(size: int, environ: Mapping[str, str]) -> Finding:
    """Compare the number of ranks MPI knows with the number the launcher started."""
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


def hosts(places: Sequence[Place]) -> list[Finding]:
    """Return what the places of all ranks, in rank order, say together: cores, binding, differing installations."""
    on_host: dict[str, list[Place]] = {}
    for place in places:
        on_host.setdefault(place.host, []).append(place)
    crowded = [finding for host, here in on_host.items() for finding in _crowded(host, here)]
    spread = ", ".join(f"{len(here)} on {host}" for host, here in islice(on_host.items(), 4))
    more = f" and {len(on_host) - 4} hosts more" if len(on_host) > 4 else ""
    return [*(crowded or [Finding("cores", "ok", f"ranks: {spread}{more}")]), *_differing(places)]


def _crowded(host: str, places: Sequence[Place]) -> Iterator[Finding]:
    usable = frozenset[int]().union(*(place.cores for place in places))
    if len(places) <= len(usable):
        return
    if len(usable) < places[0].host_cores:
        text = f"{len(places)} ranks are bound to {len(usable)} of the {places[0].host_cores} cores of {host}"
        yield Finding("cores", "warn", text, "mpirun --bind-to none, or ask the batch system for more cores")
    else:
        text = f"{len(places)} ranks share the {len(usable)} cores of {host}"
        cure = "timings mislead; with Open MPI set OMPI_MCA_mpi_yield_when_idle=1, as slurm/env.sh does"
        yield Finding("cores", "warn", text, cure)


def _differing(places: Sequence[Place]) -> Iterator[Finding]:
    for name in places[0].versions:
        first_rank: dict[str, int] = {}
        for rank, place in enumerate(places):
            first_rank.setdefault(place.versions[name], rank)
        if len(first_rank) > 1:
            text = "; ".join(f"{value} on rank {rank} ({places[rank].host})" for value, rank in first_rank.items())
            status: Status = "FAIL" if name in ("mpicomp", "MPI") else "warn"
            yield Finding(f"same {name}", status, text, "install one environment that all hosts see")
