"""``mpicomp report check FILE`` checks a report of ``mpicomp bench --report`` before it is sent to others.

The exit status is 0 for a valid report, 1 for another one, and 2 for a file that cannot be read.
"""

from __future__ import annotations

import argparse
import sys

from collectives.json_file import read_json
from collectives.quoting import one_line
from mpicomp.cli.cluster_report.validation import AGAIN, problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``mpicomp report``."""
    parser.epilog = "mpicomp run -n 4 -m mpicomp bench --report writes such a file."
    parser.add_argument("action", choices=("check",), help="check: print a line for each problem, with its cure")
    parser.add_argument("file", metavar="FILE", help="JSON file of mpicomp bench --report")


def run(args: argparse.Namespace) -> int:
    """Check a file and return the exit status."""
    try:
        found = problems(read_json(args.file, AGAIN))
    except OSError as error:
        print(f"mpicomp report: error: {one_line(args.file)}: {error.strerror}; name a report", file=sys.stderr)
        return 2
    except ValueError as error:
        found = [str(error)]
    print("\n".join(found) or f"{one_line(args.file)} is a valid report")
    return int(bool(found))
