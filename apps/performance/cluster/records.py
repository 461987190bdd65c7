"""Records of cells: parts of several jobs put together, written, read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from apps.performance.cluster.grid import Cell, Cluster
from apps.performance.cluster.implementations import MPICH_DEFAULT
from apps.records import Record, read_record

IN_MPICH = " (MPICH job)"


def merge(parts: Sequence[Record], left_out: dict[str, str]) -> Record:
    """One record of a cell from those of its jobs, which have settings in common.

    Names in jobs with MPICH say so, except MPI's own all-reduce, whose name does anyway.
    """
    timings: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        mpich = part["library"] == "mpich"
        for name, timed in part["timings"].items():
            timings.setdefault(name + IN_MPICH if mpich and name != MPICH_DEFAULT else name, []).append(timed)
    first = parts[0]
    return {
        "part": "cluster",
        "settings": first["settings"],
        "environment": merge_environments(parts),
        "links": first["links"],
        "advised": [part["advised"] for part in parts if "advised" in part],
        "timings": {name: _merge_timings(jobs) for name, jobs in timings.items()},
        "left_out": left_out,
    }


def cell_of(record: Record) -> Cell:
    """Return the cell that a record of the grid belongs to."""
    return Cell(cluster_of(record), record["settings"]["bytes"])


def cluster_of(record: Record) -> Cluster:
    """Return the cluster that a record belongs to."""
    return Cluster(*(record["settings"][name] for name in ("nodes", "rate", "between")))


def in_order(records: Iterable[Record]) -> list[Record]:
    """Sort records by nodes, links and size."""

    def place(record: Record) -> tuple[Any, ...]:
        cell = cell_of(record)
        cluster = cell.cluster
        return cluster.nodes, cluster.between != "none", cluster.bits_per_s or float("inf"), cell.nbytes

    return sorted(records, key=place)


def merge_environments(jobs: Sequence[Record]) -> dict[str, Any]:
    """Merge the environments of several jobs: all MPI libraries, the highest load, memory's scaling before each."""
    found = [job["environment"] for job in jobs]
    return found[0] | {
        "mpi": " and ".join(dict.fromkeys(one["mpi"] for one in found)),
        "load": max(one["load"] for one in found),
        "memory_scaling": [scaling for one in found for scaling in one["memory_scaling"]],
    }


def medians_by_job(timed: dict[str, Any]) -> list[float]:
    """The median of each job's times."""
    ends = accumulate(timed["calls_per_job"], initial=0)
    return [median(timed["times_s"][start:end]) for start, end in pairwise(ends)]


def _merge_timings(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several jobs' timings of one implementation: all times, the median over jobs, and means over all calls."""
    weights = [len(job["times_s"]) for job in jobs]
    times = [seconds for job in jobs for seconds in job["times_s"]]

    def mean(values: Sequence[float]) -> float:
        return float(np.average(values, weights=weights))

    costs = [job["cost"] for job in jobs]
    return {
        "median_s": median(median(job["times_s"]) for job in jobs),
        "min_s": min(times),
        "p99_s": float(np.percentile(times, 99)),
        **{name: mean([job[name] for job in jobs]) for name in ("elapsed_s", "cpu_s", "wire_bytes", "wire_bytes_most")},
        "cost": {name: mean([cost[name] for cost in costs]) for name in costs[0]} if all(costs) else None,
        "times_s": times,
        "calls_per_job": weights,
    }


def read(folder: Path, part: str) -> list[Record]:
    """All records of a part ("cluster", "overlap" or "methods") in a folder."""
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    return [record for record in records if record["part"] == part]
