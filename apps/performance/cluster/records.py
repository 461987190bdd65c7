"""Records of cells: parts of several jobs put together, written, read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from apps.performance.cluster.grid import Cell, Net
from apps.records import Record, read_record

IN_MPICH = " (MPICH job)"


def merge(parts: Sequence[Record], left_out: dict[str, str]) -> Record:
    """One record of a cell from those of its jobs, which have settings in common.

    Ways of jobs with MPICH get its name, but for MPI's own all-reduce, which has it already.
    """
    ways: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        mpich = part["library"] == "mpich"
        for name, timed in part["ways"].items():
            ways.setdefault(name + IN_MPICH if mpich and name != "MPICH" else name, []).append(timed)
    first = parts[0]
    return {
        "part": "cluster",
        "settings": first["settings"],
        "environment": first["environment"] | of_jobs(parts),
        "links": first["links"],
        "advised": [advised for part in parts for advised in part.get("advised", [])],
        "ways": {name: _together(jobs) for name, jobs in ways.items()},
        "left_out": left_out,
    }


def cell_of(record: Record) -> Cell:
    """Which cell a record of the grid is of."""
    settings = record["settings"]
    return Cell(Net(settings["nodes"], settings["rate"], settings["between"]), settings["bytes"])


def in_order(records: Iterable[Record]) -> list[Record]:
    """By nodes, links and size."""

    def place(record: Record) -> tuple[Any, ...]:
        cell = cell_of(record)
        return cell.net.nodes, cell.net.between != "none", cell.net.bits_per_s or float("inf"), cell.nbytes

    return sorted(records, key=place)


def of_jobs(parts: Sequence[Record]) -> dict[str, Any]:
    """The facts that differ between jobs."""
    return {
        "mpi": " and ".join(dict.fromkeys(part["environment"]["mpi"] for part in parts)),
        "load": max(part["environment"]["load"] for part in parts),
        "memory_scaling": [scaling for part in parts for scaling in part["environment"].get("memory_scaling", [])],
    }


def medians_by_job(timed: dict[str, Any]) -> list[float]:
    """The median of each job's times."""
    ends = accumulate(timed["calls_per_job"], initial=0)
    return [median(timed["times_s"][start:end]) for start, end in pairwise(ends)]


def _together(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several jobs' timings of one way: times one after the other, the median over jobs, the rest over all calls."""
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
    found = [record for record in records if record["part"] == part]
    for timed in (timed for record in found for timed in record.get("ways", {}).values()):
        timed["median_s"] = median(medians_by_job(timed))  # older ones have the median of all calls
    return found
