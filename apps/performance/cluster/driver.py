"""Jobs on a standing cluster, the records they leave, and the loop over the jobs of a measurement."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apps.emulator.link_speed import measure
from apps.emulator.mpirun import run_on_hosts
from apps.emulator.network import ClusterError, Network
from apps.launch import PROJECT, JobFailed, write_request
from apps.performance.cluster.grid import BUDGET_S, TARGET_BUDGET_S, Cell, Cluster, product
from apps.performance.cluster.implementations import MEMORY_PART, MPICH_DEFAULT, choose, memory_bytes, of_library
from apps.performance.cluster.records import IN_MPICH, merge
from apps.performance.idle_memory import memory_scaling
from apps.records import Record, read_record, write_record
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS
from mpicomp.cli.kernel_files import kilobytes

LONGEST_JOB_S = 1800.0
MPICH_PYTHON = PROJECT / ".venv-mpich" / "bin" / "python"
FAILURES = (ClusterError, JobFailed, FileNotFoundError)
"""What a job that measures nothing raises."""


@dataclass(frozen=True)
class ClusterJob:
    """Job of a measurement: its cluster, the name of its record, and arguments of the function that measures.

    `turn` counts the jobs whose records become one.
    """

    cluster: Cluster
    name: str
    arguments: Mapping[str, Any]
    ranks_per_node: int = 1
    turn: int = 0


@dataclass(frozen=True)
class ClusterMeasurement:
    """Measurement that has a cluster to itself: its jobs, the work of each rank in one, and the tables of all records.

    Parameters
    ----------
    part : str
        Name of the measurement, and of its folder of records.
    jobs : callable
        Gives the jobs in their order, of the folder in which the measurements have theirs. A job may depend on records
        of those before it; an error of `FAILURES` ends the list.
    measure : callable
        Called with a communicator of all ranks, a job's arguments and, if it has such a parameter, the ``address`` of
        the first host; collective. Returns a record.
    render : callable
        Markdown of all records.
    turns : int
        Jobs of each record.
    merge : callable, optional
        Makes one record of those of several turns.
    """

    part: str
    jobs: Callable[[Path], Iterable[ClusterJob]]
    measure: Callable[..., Record]
    render: Callable[[Sequence[Record]], str]
    turns: int = 1
    merge: Callable[[Sequence[Record]], Record] | None = None


def measure_missing(measurement: ClusterMeasurement, records: Path, fresh: bool) -> list[str]:
    """Run the jobs whose record is missing, or all if `fresh`; returns the failures."""
    folder, failed = records / measurement.part, list[str]()
    try:
        for job in measurement.jobs(records):
            path = folder / f"{job.name}.json"
            turns = [folder / "parts" / f"{job.name}.{turn}.json" for turn in range(measurement.turns)]
            if fresh and job.turn == 0:
                for old in turns:
                    old.unlink(missing_ok=True)
            if path.exists() and not fresh:
                continue
            mine = turns[job.turn] if measurement.merge else path
            if mine == path or not mine.exists():
                failed += _measure_one(measurement.part, job, mine)
            if measurement.merge and all(turn.exists() for turn in turns):
                write_record(path, measurement.merge([read_record(turn) for turn in turns]))
                for turn in turns:
                    turn.unlink()
    except FAILURES as error:
        failed.append(f"{measurement.part}: {error}")
    return failed


def _measure_one(part: str, job: ClusterJob, path: Path) -> list[str]:
    what = f"{job.name}, job {job.turn + 1}"
    log(f"{what}: {job.cluster.nodes} nodes, {job.cluster.links}")
    try:
        measure_alone(part, job.cluster, path, job.ranks_per_node, **job.arguments)
    except FAILURES as error:
        return [f"{what}: {error}"]
    return []


@dataclass(frozen=True)
class Limits:
    """Of one cell.

    `budget_s` is for timed calls with Open MPI, and a third of it for those with MPICH; by default a cell that targets
    are of has more. The least calls of each implementation are made even where they take longer. An implementation that
    is expected to take longer than `longest_s` a call is left out.
    """

    budget_s: float | None = None
    longest_s: float = 15.0

    def budget_of(self, cell: Cell) -> float:
        """Seconds for a cell."""
        if self.budget_s is not None:
            return self.budget_s
        return TARGET_BUDGET_S if cell in product((4,), ("1gbit", "10gbit"), ("100MB",)) else BUDGET_S


@contextmanager
def set_up_cluster(cluster: Cluster) -> Iterator[tuple[Network, Path, list[dict[str, Any]]]]:
    """A cluster's hosts, a folder for their jobs, and a record of the links' rates."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-cluster-") as scratch, Network(cluster.layout) as network:
        links = measure(network)
        yield (
            network,
            Path(scratch),
            [{"what": link.what, "asked": str(link.requested), "bits_per_s": link.bits_per_s} for link in links],
        )


def measure_cells(
    cluster: Cluster, cells: Sequence[Cell], folder: Path, limits: Limits, mpich: bool, fresh: bool = False
) -> None:
    """Measure cells of one cluster, in turns of the libraries; unless `fresh`, parts that are there stay as they are.

    After one of `FAILURES`, parts that were measured before stay.
    """
    sequence = ["openmpi", "mpich"] * 2 if mpich else ["openmpi"]  # jobs that take turns; without MPICH one is enough
    parts = {cell: [folder / "parts" / f"{cell.name}.{job}.json" for job in range(len(sequence))] for cell in cells}
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    for path in (path for paths in parts.values() for path in paths if fresh):
        path.unlink(missing_ok=True)
    left_out: dict[Cell, dict[str, str]] = {cell: {} for cell in cells}
    with set_up_cluster(cluster) as (network, scratch, links):
        for job, library in enumerate(sequence):
            known = of_library(library, cluster.nodes)
            asked = []
            for cell in cells:
                chosen, without = choose(known, cell, limits.budget_of(cell), limits.longest_s)
                if library == "mpich" and MPICH_DEFAULT in without:
                    chosen = []  # the others are there to be compared with it
                if memory_bytes(chosen, cell) > MEMORY_PART * free_bytes():
                    chosen, without = [], {one.name: "not enough memory" for one in known}
                left_out[cell] |= {name + IN_MPICH * (library == "mpich"): why for name, why in without.items()}
                path = parts[cell][job]
                if chosen and not path.exists():
                    share = sequence.count(library) * (3 if library == "mpich" else 1)
                    asked.append({"bytes": cell.nbytes, "names": [one.name for one in chosen],
                                  "budget_s": limits.budget_of(cell) / share, "path": str(path.resolve())})  # fmt: skip
            if asked:
                request = {"kind": "grid", "library": library, "cells": asked, "links": links}
                run_job(network, scratch, cluster, request, library)
    for cell in cells:
        mine = [path for path in parts[cell] if path.exists()]
        if mine:
            write_record(folder / f"{cell.name}.json", merge([read_record(path) for path in mine], left_out[cell]))
        for path in mine:
            path.unlink()


def measure_alone(part: str, cluster: Cluster, path: Path, ranks_per_node: int = 1, **arguments: Any) -> Record:
    """Run a job of a measurement on a cluster of its own; returns the record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with set_up_cluster(cluster) as (network, scratch, links):
        request = {"kind": part, "arguments": arguments, "ranks_per_node": ranks_per_node, "links": links}
        run_job(network, scratch, cluster, request | {"path": str(path.resolve())})
    return read_record(path)


def run_job(
    network: Network, folder: Path, cluster: Cluster, request: dict[str, Any], library: str = "openmpi"
) -> None:
    """Run `job` on all hosts to its end. Its records show the load and the speed of shared memory before it began."""
    head = {
        "cluster": asdict(cluster),
        "address": network.nodes[0].address,
        "environment": {"load": round(os.getloadavg()[0], 2), "memory_scaling": [memory_scaling()]},
    }
    arguments = ["-m", "apps.performance.cluster.job", write_request(folder, head | request)]
    chosen: dict[str, Any] = {"mpi": "mpich", "python": MPICH_PYTHON} if library == "mpich" else {"settings": SETTINGS}
    chosen["ranks_per_node"] = request.get("ranks_per_node", 1)
    run_on_hosts(network, folder, f"{library} job on {cluster.name}", arguments, LONGEST_JOB_S, **chosen)


def has_mpich() -> bool:
    """Return True if `make test-mpich` has made its environment."""
    return MPICH_PYTHON.exists() and MPICH_PYTHON.with_name("mpirun").exists()


def free_bytes() -> int:
    """Memory that this machine could give out now."""
    return 1024 * kilobytes(Path("/proc/meminfo"), "MemAvailable")


def log(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
