"""Measure the tables of docs/performance-tables.md that need no emulated cluster, and write them and their records.

Run ``python -m apps.performance.run_all`` on a machine that does nothing else. A part that has a record is not measured
again, unless ``--fresh`` is given. ``--only kernels,allreduce`` names parts. ``--quick`` shows in minutes that every
part runs, and prints the tables instead of writing them. Tables of parts that take a GPU are always printed, as the
document is of a machine without one. On machines without a GPU these parts print that, and have no record.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from apps.appendices import publish
from apps.launch import PROJECT, mpi_environment, python_command, run
from apps.performance.part import Part, choose_from
from apps.records import read_record

DOCUMENT = PROJECT / "docs" / "performance-tables.md"
LONGEST_S = 3600.0
PARTS = (
    "kernels", "codecs", "rows", "entropy", "threads", "allreduce", "dense-sizes", "small-calls", "startup", "memory",
    "auto", "wrapper", "watching", "torch-backend", "torch-load", "power-sgd", "pipeline-store", "soak",
    "idle-memory",
)  # fmt: skip
GPU_PARTS = ("gpu-kernels", "gpu-allreduce", "gpu-training")


@dataclass(frozen=True)
class Job:
    """A part, started once under a name: that of its record and of its place in the document."""

    name: str
    part: Part
    ranks: int | None  # None: without mpirun

    def arguments(self, path: Path, quick: bool) -> list[str]:
        """Return Python's arguments that measure the part and write the record."""
        return ["-m", f"apps.performance.{self.part.module}", "--json", str(path), *["--quick"] * quick]


def jobs(names: Sequence[str] = PARTS) -> list[Job]:
    """One job for each part, or for each number of ranks that the part is measured with."""
    found = []
    for name in names:
        part: Part = import_module(f"apps.performance.{name.replace('-', '_')}").PART
        for ranks in part.ranks or (None,):
            several = f"-{ranks}-rank{'s' if ranks != 1 else ''}" if len(part.ranks) > 1 else ""
            found.append(Job(name + several, part, ranks))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a part failed."""
    options = _parser().parse_args(argv)
    os.nice(options.nice)
    default = PROJECT / "runs" / ("performance-quick" if options.quick else "performance")
    folder = (options.json_dir or default).resolve()
    document = options.docs or (None if options.quick else DOCUMENT)
    deadline = time.monotonic() + options.budget_s
    failed: list[str] = []
    for job in jobs(options.only):
        path = folder / f"{job.name}.json"
        if not measure(job, path, options, deadline):
            failed.append(job.name)
        if path.exists():
            write_table(job, path, None if job.name.startswith(GPU_PARTS) else document)
    if failed:
        print(f"error: without a result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(job: Job, path: Path, options: argparse.Namespace, deadline: float) -> bool:
    """Start a job unless its record is there; whether the record is there then."""
    there, late = path.exists() and not options.fresh, time.monotonic() >= deadline
    state = ": measured before" if there else ": no time left" if late else ""
    print(f"--- {job.name}{state}", file=sys.stderr, flush=True)
    if there or late:
        return there
    command = python_command(job.ranks, job.arguments(path, options.quick))
    status, output = run(command, mpi_environment(), cwd=PROJECT, timeout_s=LONGEST_S)
    if status:
        print(f"error: {job.name} ended with status {status}\n{output}", file=sys.stderr, flush=True)
    elif not path.exists():  # it says why
        print(output, file=sys.stderr, end="", flush=True)
    return status == 0


def write_table(job: Job, path: Path, document: Path | None) -> None:
    """Render a record, into the document or else to standard output."""
    body = job.part.render(read_record(path))
    if document is None:
        print(f"\n## {job.name}\n\n{body}", flush=True)
    else:
        publish(document, job.name, body)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.performance.run_all", description=__doc__.partition("\n")[0])
    every = (*PARTS, *GPU_PARTS)
    parser.add_argument("--quick", action="store_true", help="small forms; prints tables")
    parser.add_argument("--only", type=choose_from(every), default=every, metavar="PART,PART", help=", ".join(every))
    parser.add_argument("--fresh", action="store_true", help="measure again what is measured already")
    parser.add_argument("--json-dir", type=Path, metavar="DIR", help="of the records (runs/performance)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="file of the tables (docs/performance-tables.md)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="nothing starts after so many seconds")
    parser.add_argument("--nice", type=int, default=0, help="by how much to give way to other programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
