"""Overlap at several rates, and at the one where wire and computing take equally long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from apps.performance.cluster.driver import FAILURES, log, measure_alone
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.ratios import balanced
from apps.performance.cluster.records import merge_environments
from apps.records import Record, read_record, write_record

N, REPEATS, JOBS = 25_000_000, 25, 5
CLUSTERS = (
    Cluster(4, "1gbit"),
    *(Cluster(2, rate) for rate in ("500mbit", "1gbit", "2gbit", "4gbit", "8gbit", "none")),
)


def run(folder: Path, fresh: bool, n: int = N, repeats: int = REPEATS, jobs: int = JOBS) -> list[str]:
    """Measure what is missing; returns what failed."""
    failed = _measure({cluster: f"overlap-{cluster.name}" for cluster in CLUSTERS}, folder, fresh, n, repeats, jobs)
    paths = [folder / f"overlap-{cluster.name}.json" for cluster in CLUSTERS if cluster.nodes == 2]
    records = [read_record(path) for path in paths if path.exists()]
    balanced_mbit = balance(records)
    if balanced_mbit is None:
        return [*failed, "overlap: no rate found at which wire and computing take equally long"]
    equal = {Cluster(2, f"{balanced_mbit}mbit"): "overlap-balanced"}
    return failed + _measure(equal, folder, fresh, n, repeats, jobs)


def _measure(names: Mapping[Cluster, str], folder: Path, fresh: bool, n: int, repeats: int, jobs: int) -> list[str]:
    """Let the clusters whose record is missing take turns, a job each; returns what failed, which has no record."""
    failed = []
    missing = {cluster: name for cluster, name in names.items() if fresh or not (folder / f"{name}.json").exists()}
    parts = {
        cluster: [folder / "parts" / f"{name}.{job}.json" for job in range(jobs)] for cluster, name in missing.items()
    }
    for path in (path for paths in parts.values() for path in paths if fresh):
        path.unlink(missing_ok=True)
    for job in range(jobs):
        for cluster, paths in parts.items():
            if not paths[job].exists():
                log(f"overlap, job {job + 1} of {jobs}: {cluster.nodes} nodes, {cluster.links}")
                try:
                    measure_alone("overlap", cluster, paths[job], n=n, repeats=repeats)
                except FAILURES as error:
                    failed.append(f"overlap, {cluster.name}, job {job + 1}: {error}")
    for cluster, paths in parts.items():
        if all(path.exists() for path in paths):
            write_record(folder / f"{missing[cluster]}.json", merge_jobs([read_record(path) for path in paths]))
            for path in paths:
                path.unlink()
    return failed


def merge_jobs(jobs: Sequence[Record]) -> Record:
    """One record of several jobs on links of the same rate: medians over jobs, and each job's overlap."""
    names = ("wire_s", "compute_s", "both_s", "overlap", "exposed_s", "moving_s")
    links = [
        {**first, "bits_per_s": median(link["bits_per_s"] for link in (first, *others))}
        for first, *others in zip(*(job["links"] for job in jobs), strict=True)
    ]
    return {
        **jobs[0],
        **{name: median(job[name] for job in jobs) for name in names},
        "overlaps": [job["overlap"] for job in jobs],
        "times_s": {name: [job["times_s"][name] for job in jobs] for name in jobs[0]["times_s"]},
        "links": links,
        "environment": merge_environments(jobs),
    }


def balance(records: Sequence[Record]) -> int | None:
    """The rate to ask for, in Mbit/s, so that wire and computing take equally long."""
    found = balanced(records)
    return None if found is None else round(found / 0.956 / 1e6)
