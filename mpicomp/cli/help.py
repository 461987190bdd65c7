"""``mpicomp help TOPIC`` prints a page of the manual."""

from __future__ import annotations

import argparse
import sys

from mpicomp.manual import help_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of ``mpicomp help``."""
    parser.add_argument(
        "topic",
        nargs="?",
        help="page, such as faults or quickstart, or a method, such as marsit (default: list all pages)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the page and return the exit status."""
    try:
        help_page(args.topic)
    except ValueError as error:
        print(f"mpicomp help: error: {error}", file=sys.stderr)
        return 2
    return 0
