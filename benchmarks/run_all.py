"""Measure everything that docs/performance-tables.md shows, and write its tables.

``python -m benchmarks.run_all`` on a machine that does nothing else. What is measured already is not measured again
(``--fresh`` does); ``--only kernels,allreduce`` names parts; ``--quick`` shows in minutes that all of it runs, and
prints its tables instead of writing them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.jobs import PROJECT, environment, run
from benchmarks.record import replace_block

DOCUMENT = PROJECT / "docs" / "performance-tables.md"
LONGEST_S = 3600.0


@dataclass(frozen=True)
class Job:
    """One module, started once.

    Attributes
    ----------
    part : str
        What ``--only`` calls it.
    name : str
        Of its record and of its place in the document.
    module : str
    ranks : int or None
        None: without mpirun.
    """

    part: str
    name: str
    module: str
    ranks: int | None = None


JOBS = (
    Job("kernels", "kernels", "kernels"),
    Job("codecs", "codecs", "codecs"),
    Job("entropy", "entropy", "entropy"),
    Job("allreduce", "allreduce-2-ranks", "allreduce", 2),
    Job("allreduce", "allreduce-4-ranks", "allreduce", 4),
    Job("dense-sizes", "dense-sizes", "dense_sizes", 2),
    Job("small-calls", "small-calls-1-rank", "small_calls", 1),
    Job("small-calls", "small-calls-2-ranks", "small_calls", 2),
    Job("startup", "startup", "startup"),
    Job("memory", "memory", "memory", 2),
    Job("left-alone", "left-alone", "left_alone"),
    Job("cascading", "cascading", "cascading", 8),
    Job("learning", "learning", "learning"),
)
PARTS = tuple(dict.fromkeys(job.part for job in JOBS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a part failed."""
    options = _parser().parse_args(argv)
    os.nice(options.nice)
    folder = (options.json_dir or PROJECT / "runs" / ("benchmarks-quick" if options.quick else "benchmarks")).resolve()
    document = options.docs or (None if options.quick else DOCUMENT)
    deadline = time.monotonic() + options.budget_s
    failed: list[str] = []
    for job in JOBS:
        if job.part in options.only:
            path = folder / f"{job.name}.json"
            if not measured(job, path, options, deadline):
                failed.append(job.name)
            if path.exists():
                tables(job, path, document)
    if failed:
        print(f"error: without a result: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measured(job: Job, path: Path, options: argparse.Namespace, deadline: float) -> bool:
    """Start a job unless its record is there; whether the record is there then."""
    # The study of learning keeps records of its own runs and repeats none of them.
    if path.exists() and not options.fresh and job.part != "learning":
        print(f"--- {job.name}: measured before", file=sys.stderr, flush=True)
        return True
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        print(f"--- {job.name}: no time left", file=sys.stderr, flush=True)
        return False
    print(f"--- {job.name}", file=sys.stderr, flush=True)
    arguments = ["-m", f"benchmarks.{job.module}", "--json", str(path), *(["--quick"] if options.quick else [])]
    limit_s = LONGEST_S
    if job.part == "learning":
        arguments += ["--folder", str(path.with_suffix("")), "--seeds", str(options.seeds)]
        arguments += ["--datasets", options.datasets, "--budget-s", str(left_s)]
        limit_s = left_s + LONGEST_S
    status, output = run(job.ranks, arguments, environment(), limit_s, capture=job.part != "learning")
    if status:
        print(f"error: {job.name} ended with status {status}\n{output}", file=sys.stderr, flush=True)
    return status == 0


def tables(job: Job, path: Path, document: Path | None) -> None:
    """Render a record, into the document or else to standard output."""
    body: str = importlib.import_module(f"benchmarks.{job.module}").render(json.loads(path.read_text()))
    if document is None:
        print(f"\n## {job.name}\n\n{body}", flush=True)
    else:
        document.write_text(replace_block(document.read_text(), job.name, body))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_all", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small forms; prints tables")
    parser.add_argument("--only", type=_parts, default=PARTS, metavar="PART,PART", help=", ".join(PARTS))
    parser.add_argument("--fresh", action="store_true", help="measure again what is measured already")
    parser.add_argument("--json-dir", type=Path, metavar="DIR", help="of the records (runs/benchmarks)")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="file of the tables (docs/performance-tables.md)")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="nothing starts after so many seconds")
    parser.add_argument("--seeds", type=int, default=5, help="of the learning study (default %(default)s)")
    parser.add_argument("--datasets", default="digits,fashion-mnist", help="of the learning study (%(default)s)")
    parser.add_argument("--nice", type=int, default=0, help="by how much to give way to other programs")
    return parser


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    unknown = next((part for part in parts if part not in PARTS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"{unknown!r} is none of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
