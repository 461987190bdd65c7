"""Compare the speed of two checkouts, whose own measurements are run in turn.

``python -m apps.performance.compare_checkouts --old PATH --new PATH`` prints a row for every figure of the kernels,
all-reduce, dense-size and small-call tables. The exit status is 1 if a figure is slower in the new checkout. Both
checkouts call MPI's own all-reduce: the ratio of its times shows how much of a difference is noise of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from apps.launch import PROJECT, mpi_environment, python_command, run_or_raise
from apps.performance.part import Column, choose_from, format_seconds, get, table
from apps.performance.run_all import LONGEST_S, PARTS, Job, jobs
from apps.records import Record, read_record

TABLES = tuple(
    part for part in PARTS if part not in ("soak", "idle-memory", "startup", "memory", "torch-load", "pipeline-store")
)
LEAST_RATIO = 0.97
CONTROLS = {"mpi", "MPI_Allreduce", "read alone", "streaming stores alone"}
"""Calls that no checkout changes: what differs there is the machine."""
Figures = Mapping[tuple[str, ...], float]
"""Median seconds by the names of table, row and call."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a ratio is too low."""
    options = _parser().parse_args(argv)
    found: dict[str, list[Figures]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="mpicomp-compare-") as folder:
        for turn in range(options.turns):
            for job in jobs(options.tables):
                # each goes first in every other turn
                for which in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                    print(f"--- turn {turn + 1} of {options.turns}: {job.name}, {which}", file=sys.stderr, flush=True)
                    path = Path(folder) / f"{which}-{turn}-{job.name}.json"
                    measure(getattr(options, which).resolve(), job, path, options.quick)
                    found[which].append(dict(figures(job.name, read_record(path))))
    rows = compare(found["old"], found["new"])
    print(table(COLUMNS, rows))
    slower = sum(_verdict(row) == "**slower**" for row in rows)
    print(f"\n{slower} of {len(rows)} figures are slower: old / new is below {LEAST_RATIO}.")
    return 1 if slower else 0


def measure(checkout: Path, job: Job, path: Path, quick: bool) -> None:
    """Run a checkout's own program."""
    arguments = job.arguments(path, quick)
    if not (checkout / "apps" / "performance").is_dir():  # as it was called before
        arguments[1] = f"benchmarks.{job.part.module}"
    command = python_command(job.ranks, arguments)
    run_or_raise(f"{job.name} of {checkout}", command, mpi_environment(checkout), LONGEST_S, cwd=checkout)


def figures(name: str, record: Record) -> Iterator[tuple[tuple[str, ...], float]]:
    """Name and median seconds of everything that a record has timed; the first field of a row is its name."""
    for row in record["rows"]:
        label = str(next(iter(row.values())))
        for call, timed in {"": row, **row}.items():
            if isinstance(timed, dict) and "median_s" in timed:
                yield (name, label, call), timed["median_s"]


def compare(old: Sequence[Figures], new: Sequence[Figures]) -> list[Record]:
    """Measurements of both: medians over turns, their ratio, and the range of the ratios of single turns."""
    rows = []
    for key in dict.fromkeys(key for one in old for key in one):
        before, after = ([one[key] for one in found if key in one] for found in (old, new))
        if before and after:
            each = [one / other for one, other in zip(before, after, strict=True)]
            ratio = median(before) / median(after)
            rows.append({"key": key, "old": median(before), "new": median(after), "ratio": ratio, "each": each})
    return rows


def _verdict(row: Record) -> str:
    if row["ratio"] >= LEAST_RATIO:
        return ""
    return "noise" if CONTROLS & {*row["key"]} else "**slower**"


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
        "--tables", type=choose_from(TABLES), default=TABLES, metavar="TABLE,TABLE", help=", ".join(TABLES)
    )
    parser.add_argument("--turns", type=int, default=5, help="how often each checkout is measured (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small forms, which show that everything runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
