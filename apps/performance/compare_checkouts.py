"""Compare the speed of two checkouts, whose own measurements are run in turn.

``python -m apps.performance.compare_checkouts --old PATH --new PATH`` prints a row for every figure of the kernels,
all-reduce, dense-size and small-call tables, and with ``--tables cluster-grid,cluster-steps`` of those of the emulated
cluster, which need root. The exit status is 1 if a figure is slower in the new checkout. Both checkouts call MPI's own
all-reduce: the ratio of its times shows how much of a difference is noise of the machine.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from apps.launch import PROJECT, mpi_environment, python_command, run_or_raise
from apps.performance.cluster.measurements import MEASUREMENTS
from apps.performance.part import Column, choose_from, format_seconds, get, make_record, table
from apps.performance.run_all import LONGEST_S, PARTS, Job, jobs
from apps.records import Record, read_record, write_record

TABLES = tuple(
    part for part in PARTS if part not in ("soak", "idle-memory", "startup", "memory", "torch-load", "pipeline-store")
)
CLUSTER = "cluster-"
CLUSTER_TABLES = tuple(CLUSTER + part for part in ("grid", *MEASUREMENTS))
GRID = {
    False: ["--nodes", "4", "--rates", "100mbit,1gbit,none", "--sizes", "64kB,1MB,16MB,100MB", "--budget-s", "5"],
    True: ["--nodes", "2", "--rates", "1gbit", "--sizes", "64kB", "--budget-s", "0.5"],
}
"""Cells of the grid, by whether they only show that everything runs."""
LEAST_RATIO = 0.97
CONTROLS = ("mpi", "mpi_allreduce", "open mpi", "gloo", "read alone", "streaming stores alone", "wire", "sendrecv")
"""First words of calls that no checkout changes: what differs there is the machine."""
Figures = Mapping[tuple[str, ...], float]
"""Median seconds by the names of table, row and call."""
FoundFigures = Iterator[tuple[tuple[str, ...], float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a ratio is too low."""
    options = _parser().parse_args(argv)
    found: dict[str, list[Figures]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="mpicomp-compare-") as folder:
        for turn in range(options.turns):
            for name, measure, read in measurements(options.tables):
                # each goes first in every other turn
                for which in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                    print(f"--- turn {turn + 1} of {options.turns}: {name}, {which}", file=sys.stderr, flush=True)
                    path = Path(folder) / f"{which}-{turn}-{name}"
                    measure(getattr(options, which).resolve(), path, options.quick)
                    found[which].append(dict(read(name, path)))
    rows = compare(found["old"], found["new"])
    print(table(COLUMNS, rows))
    if options.json is not None:
        write_record(options.json, make_record(rows, turns=options.turns))
    slower = sum(_verdict(row) == "**slower**" for row in rows)
    print(f"\n{slower} of {len(rows)} figures are slower: old / new is below {LEAST_RATIO}.")
    return 1 if slower else 0


def measurements(tables: Sequence[str]) -> Iterator[tuple[str, Callable[..., None], Callable[..., FoundFigures]]]:
    """Name of each measurement, and the functions that make it in a checkout and read its figures."""
    for job in jobs([one for one in tables if one in TABLES]):
        yield job.name, partial(measure_job, job), figures
    for one in tables:
        if one in CLUSTER_TABLES:
            yield one, partial(measure_cluster, one.removeprefix(CLUSTER)), cluster_figures


def measure_job(job: Job, checkout: Path, path: Path, quick: bool) -> None:
    """Run a checkout's own program."""
    arguments = job.arguments(path, quick)
    if not (checkout / "apps" / "performance").is_dir():  # as it was called before
        arguments[1] = f"benchmarks.{job.part.module}"
    command = python_command(job.ranks, arguments)
    run_or_raise(f"{job.name} of {checkout}", command, mpi_environment(checkout), LONGEST_S, cwd=checkout)


def measure_cluster(part: str, checkout: Path, folder: Path, quick: bool) -> None:
    """Run a checkout's own measurements of the emulated cluster, without those with MPICH."""
    arguments = ["-m", "apps.performance.cluster", "--only", part, "--json-dir", str(folder), "--fresh", "--no-mpich"]
    arguments += GRID[quick] if part == "grid" else []
    environment = dict(os.environ) | {"PYTHONPATH": str(checkout)}
    run_or_raise(f"{part} of {checkout}", [sys.executable, *arguments], environment, LONGEST_S, cwd=checkout)


def cluster_figures(name: str, folder: Path) -> FoundFigures:
    """Name and median seconds of everything that the records of a folder have timed, parts of jobs left out."""
    for path in sorted(folder.rglob("*.json")):
        if path.parent.name != "parts":
            for names, seconds in _medians(read_record(path)):
                yield (name, path.stem, ", ".join(names)), seconds


def _medians(found: Any, names: tuple[str, ...] = ()) -> FoundFigures:
    if isinstance(found, dict):
        if "median_s" in found:
            yield names, found["median_s"]
        elif "both_s" in found:
            yield (*names, "both"), found["both_s"]
        for key, part in found.items():
            yield from _medians(part, names if key in ("rows", "timings") else (*names, key))
    elif isinstance(found, list):
        for part in found:
            if isinstance(part, dict):
                yield from _medians(part, (*names, *(str(part[key]) for key in ("name", "method") if key in part)))


def figures(name: str, path: Path) -> FoundFigures:
    """Name and median seconds of everything that a record has timed; the first field of a row is its name."""
    for row in read_record(path)["rows"]:
        label = str(next(iter(row.values())))
        for call, timed in {"": row, **row}.items():
            if isinstance(timed, dict) and "median_s" in timed:
                yield (name, label, call), timed["median_s"]


def compare(old: Sequence[Figures], new: Sequence[Figures]) -> list[Record]:
    """Measurements of both: medians over turns, their ratio, and the range of the ratios of single turns."""
    rows: list[Record] = []
    for key in dict.fromkeys(key for one in old for key in one):
        turns = [(one[key], other[key]) for one, other in zip(old, new, strict=True) if key in one and key in other]
        if turns:  # a cluster's measurements leave slow implementations out
            before, after = zip(*turns, strict=True)
            ratio, each = median(before) / median(after), [one / other for one, other in turns]
            rows.append({"key": key, "old": median(before), "new": median(after), "ratio": ratio, "each": each})
    return rows


def _verdict(row: Record) -> str:
    if row["ratio"] >= LEAST_RATIO:
        return ""
    is_control = any(re.match(rf"{control}\b", one.lower()) for one in row["key"][1:] for control in CONTROLS)
    return "noise" if is_control else "**slower**"


COLUMNS: Sequence[Column] = (
    ("table", lambda row: row["key"][0]),
    ("row", lambda row: row["key"][1]),
    ("call", lambda row: row["key"][2]),
    ("old, µs", lambda row: format_seconds(row["old"], 1e-6)),
    ("new, µs", lambda row: format_seconds(row["new"], 1e-6)),
    ("old / new", get("ratio", ".3f")),
    ("of single turns", lambda row: f"{min(row['each']):.2f} to {max(row['each']):.2f}"),
    ("", _verdict),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.performance.compare_checkouts", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--old", type=Path, required=True, metavar="PATH", help="a checkout of an earlier commit")
    parser.add_argument("--new", type=Path, default=PROJECT, metavar="PATH", help="the other checkout (this one)")
    parser.add_argument(
        "--tables",
        type=choose_from((*TABLES, *CLUSTER_TABLES)),
        default=TABLES,
        metavar="TABLE,TABLE",
        help=", ".join((*TABLES, *CLUSTER_TABLES)),
    )
    parser.add_argument("--turns", type=int, default=5, help="how often each checkout is measured (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a record as well")
    parser.add_argument("--quick", action="store_true", help="small forms, which show that everything runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
