"""``python -m apps.chaos kills --kills 2000 --seed 1``: trainings whose ranks are killed at random.

A failure is printed with its seed; ``kills --seed SEED --jobs 1`` runs it again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from apps.chaos.case import Case, case_of_kills
from apps.chaos.job import Launcher
from apps.chaos.judge import Verdict
from apps.chaos.kills import campaign, table
from apps.emulator.network import ClusterError, Layout, Network
from apps.launch import exit_on_signals
from apps.records import write_record
from collectives.cost.rate import Rate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a case failed."""
    options = _parser().parse_args(argv)
    exit_on_signals()
    try:
        with ExitStack() as stack:
            network = None
            if options.hosts:
                layout = Layout((Rate.parse(options.rate),) * options.ranks)
                network = stack.enter_context(Network(layout))
            launcher = Launcher(network)

            def draw(seed: int) -> Case:
                return case_of_kills(seed, options.ranks)

            seeds = itertools.count(options.seed)
            record = campaign(
                draw, itertools.islice(seeds, options.jobs), options.kills, 60 * options.minutes, launcher, _report
            )
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(record), flush=True)
    if options.json is not None:
        write_record(options.json, record)
    return int(bool(record["failures"]))


def _report(verdict: Verdict) -> None:
    if verdict.problem:
        print(f"{verdict.problem}: {verdict.case}\n{verdict.text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m apps.chaos", description="Run trainings whose ranks die.")
    modes = parser.add_subparsers(dest="mode", required=True)
    kills = modes.add_parser("kills", help="many short jobs, whose steps are compared with those of threads")
    kills.add_argument("--kills", type=int, default=200, help="end after so many (default %(default)s)")
    kills.add_argument("--minutes", type=float, default=60.0, help="end after this time (default %(default)s)")
    kills.add_argument("--jobs", type=int, default=None, help="end after so many jobs (default: no limit)")
    kills.add_argument("--seed", type=int, default=1, help="of the first job; the next ones count up (%(default)s)")
    kills.add_argument("--ranks", type=int, default=8, help="most ranks of a job (default %(default)s)")
    kills.add_argument("--hosts", action="store_true", help="each rank on an emulated host of its own; needs root")
    kills.add_argument("--rate", default="1gbit", help="of each host's link (default %(default)s)")
    kills.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    return parser


if __name__ == "__main__":
    sys.exit(main())
