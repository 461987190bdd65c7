"""``python -m apps.finetune``: fine-tune a pretrained transformer by several methods, and compare them.

Two ranks, which are threads, train; as many runs as there are processors go on at once. Each run is kept as JSON, so
that a study that was cut off continues where it stopped. ``--tune`` looks for the learning rates instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from apps.appendices import replace_block
from apps.finetune import report, study
from apps.finetune.methods import METHODS
from apps.launch import PROJECT
from apps.performance.part import choose_from
from apps.records import write_record
from apps.studies.results import Results
from apps.train.options import positive

FOLDER = Path("runs") / "finetune"
DOCUMENT = PROJECT / "docs" / "fine-tuning.md"
FIGURE = PROJECT / "docs" / "figures" / "fine-tuning.png"
DATA = FIGURE.parent / "data" / "fine-tuning.json"
SEEDS, STEPS = 5, 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if the examples or the pretrained model are missing."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a standard error needs 2 or more")
    try:
        (_tune if options.tune else _compare)(options)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _compare(options: argparse.Namespace) -> None:
    runs = study.compare(Results(options.folder, options.fresh), options.only, options.seeds, options.steps)
    found = report.summary(runs)
    figure = report.draw(found, FIGURE if options.docs else options.folder / FIGURE.name)
    text = report.markdown(runs)
    print(f"{text}\n\nwrote {figure}")
    if options.docs:
        write_record(DATA, found)
        DOCUMENT.write_text(replace_block(DOCUMENT.read_text(), "fine-tuning", text))


def _tune(options: argparse.Namespace) -> None:
    found = study.tune(Results(options.folder, options.fresh), options.only, options.steps)
    for name, rate in found.items():
        print(f"{name}: {rate:g}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.finetune",
        description="Fine-tune a pretrained transformer by several methods on two ranks, and compare them. Runs are "
        "kept, so that a study that was cut off continues where it stopped.",
    )
    names = tuple(METHODS)
    parser.add_argument("--seeds", type=positive, default=SEEDS, metavar="N", help="runs of each method (%(default)s)")
    parser.add_argument("--steps", type=positive, default=STEPS, metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--only", type=choose_from(names), default=names, metavar="NAME,NAME", help=", ".join(names))
    parser.add_argument("--tune", action="store_true", help="find the learning rates instead, on examples of their own")
    parser.add_argument("--fresh", action="store_true", help="run again what has results already")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="of the results (%(default)s)")
    parser.add_argument("--docs", action="store_true", help="write table and figure into docs/fine-tuning.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
