"""``python -m apps.frontier PART``: costs and savings of compression, seed by seed, as tables and as JSON.

``price`` compares losses at equal local steps, on a small model, and ``small`` accuracies of short trainings that
average at every step. The other parts make the record of time, bytes and
loss for each task: ``learning`` trains, ``times`` measures steps on emulated hosts, and ``verdict`` joins both.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from apps.appendices import publish
from apps.emulator.network import ClusterError
from apps.frontier import learning, price, small, times, verdict
from apps.frontier.tasks import TASKS
from apps.launch import PROJECT, JobFailed, exit_on_signals
from apps.records import read_record, write_record
from apps.studies.results import Results

PARTS = ("price", "small", "learning", "times", "verdict")
FOLDER = Path("runs") / "frontier"
RECORDS = PROJECT / "docs" / "records" / "frontier"
PAGE = PROJECT / "docs" / "frontier.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 2 after an error."""
    options = _arguments(argv)
    exit_on_signals()
    part = f"{options.part}-quick" if options.quick else options.part
    results = Results(options.folder / part)
    try:
        if options.part == "price":
            _price(results, options)
        elif options.part == "small":
            _small(results, options)
        else:
            _frontier(results, options)
    except (OSError, ValueError, JobFailed, ClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{results.seconds():.0f} s of computing")
    return 0


def _price(results: Results, options: argparse.Namespace) -> None:
    record = price.study(results, options.seeds, options.quick)
    print(price.table(record))
    if options.publish:
        write_record(RECORDS / "price.json", record)
        publish(price.PAGE, "price", price.table(record))


def _small(results: Results, options: argparse.Namespace) -> None:
    record = small.study(results, options.seeds, options.minutes)
    print(small.table(record))
    if options.publish:
        write_record(small.RECORD, record)
        publish(price.PAGE, "small", small.table(record))


def _frontier(results: Results, options: argparse.Namespace) -> None:
    if options.part == "learning":
        learned = learning.study(results, options.task, options.seeds, options.minutes)
        print(f"{len(learned['runs'])} runs")
        if options.publish:
            write_record(learning.RECORD, learned)
    elif options.part == "times":
        measured = times.study(results, options.task)
        for rate, record in measured.items():
            print(rate, times.step_seconds(record))
        if options.publish:
            write_record(_times(options.task), measured)
    else:
        task, seeds = TASKS[options.task], range(options.seeds)
        found = verdict.judge(read_record(learning.RECORD), task, seeds, read_record(_times(options.task)))
        print(verdict.table(found))
        if options.publish:
            publish(PAGE, options.task, verdict.table(found))


def _times(task: str) -> Path:
    return RECORDS / f"times-{task}.json"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m apps.frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--task", choices=TASKS, default="gpt", help="not of price and small (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="learning and small begin no run after so many; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="price: a fifth of the steps, whose figures are no record")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of the runs, which are kept (%(default)s)")
    parser.add_argument("--publish", action="store_true", help="write the record and its table to docs")
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: an interval needs 2 or more")
    if options.quick and options.part != "price":
        parser.error(f"--quick is for price alone; leave it out for {options.part}")
    if options.quick and options.publish:
        parser.error("--publish: the figures of --quick are not those of the record; leave one of both out")
    return options


if __name__ == "__main__":
    sys.exit(main())
