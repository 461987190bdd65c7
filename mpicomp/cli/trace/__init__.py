"""``mpicomp trace`` joins the traces of a job's ranks for ui.perfetto.dev, and tells what the time was spent on.

``mpicomp trace DIR --out all.json``

It needs no MPI. The exit status is 0, or 2 where the folder has no traces that can be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from collectives.quoting import one_line
from mpicomp.cli.trace.files import Trace, read, remarks
from mpicomp.cli.trace.times import RankTrace, table

USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp trace`` to `parser`."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder in which the ranks have left their traces")
    parser.add_argument("--last", type=int, default=0, metavar="N", help="count only the newest N calls; 0 counts all")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the traces of all ranks into one file")


def run(args: argparse.Namespace) -> int:
    """Join the traces, print the table, and return the exit status."""
    try:
        traces, notes = read(args.folder)
        if args.out is not None:
            join(traces, args.out)
    except (OSError, ValueError) as error:
        print(f"mpicomp trace: error: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    print(table([RankTrace.of(trace, args.last) for trace in traces]))
    print("\n".join(f"# {note}" for note in notes + remarks(traces)))
    return 0


def join(traces: list[Trace], path: Path) -> None:
    """Write all ranks' events into one file: their times are aligned already."""
    about = {"ranks": [trace["otherData"] for trace in traces]}
    try:
        with path.open("w") as file:
            file.write(f'{{"displayTimeUnit": "ns", "otherData": {json.dumps(about)},\n"traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for trace in traces for event in trace["traceEvents"]))
            file.write("\n]}\n")
    except OSError as error:
        raise OSError(f"--out {path}: {error.strerror}; make room there, or name another file") from error
