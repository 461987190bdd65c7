"""``python -m apps.reproduce PAPER``: the claims of a paper next to our findings, as JSON, plots and a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from apps.appendices import publish
from apps.launch import PROJECT, JobFailed, exit_on_signals
from apps.reproduce.claims import Claim, Part, table
from apps.studies.results import Results

PAPERS = ("aq-sgd", "diloco", "doublesqueeze", "ecq-sgd", "marsit", "per-node", "scalecom", "sparse-loco")
FOLDER = Path("runs") / "reproduce"
DOCUMENT = PROJECT / "docs" / "reproduce.md"
SEEDS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 if a claim was not found again, 2 after an error."""
    parser = _parser()
    options = parser.parse_args(argv)
    exit_on_signals()
    if options.only and not _chosen(_parts(options), options.only):
        parser.error(f"--only {' '.join(options.only)}: the parts are {', '.join(map(_name, _parts(options)))}")
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a difference needs 2 or more")
    if options.quick and options.publish:
        parser.error("--publish: the verdicts of --quick are not those of the study; leave one of both out")
    if options.only and options.publish:
        parser.error("--publish: a table of some parts would replace that of the study; leave out --only")
    try:
        return _reproduce(options)
    except (OSError, ValueError, JobFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _reproduce(options: argparse.Namespace) -> int:
    parts = _chosen(_parts(options), options.only)
    name, seeds = (f"{options.paper}-quick", 2) if options.quick else (options.paper, options.seeds)
    results = Results((options.folder or FOLDER) / name, options.fresh)
    claims: list[Claim] = []
    written: list[Path] = []
    for part in parts:
        found, figures = part(results, seeds, options.full)
        claims += found
        written += figures
    text = table(claims)
    if not options.only:
        written.append(results.folder / "table.md")
        written[-1].write_text(text)
    if options.publish:
        publish(DOCUMENT, options.paper, text)
    print(text)
    for path in written:
        print(f"wrote {path}")
    if options.quick:
        print("A look at few seeds and short runs, whose verdicts are not those of the study.")
    failed = sum(claim.holds is False for claim in claims)
    judged = sum(claim.holds is not None for claim in claims)
    print(f"{judged - failed} of {judged} claims found again; {results.seconds():.0f} s of computing")
    return 1 if failed else 0


def _parts(options: argparse.Namespace) -> Sequence[Part]:
    study = import_module(f"apps.reproduce.{options.paper.replace('-', '_')}")
    found: Sequence[Part] = getattr(study, "QUICK", study.PARTS) if options.quick else study.PARTS
    return found


def _chosen(parts: Sequence[Part], words: Sequence[str]) -> Sequence[Part]:
    """Return the parts whose names contain one of the words; all if there are no words."""
    return [part for part in parts if not words or any(word in _name(part) for word in words)]


def _name(part: Part) -> str:
    """Return the name of a part as it is written on the command line."""
    function = part.func if isinstance(part, partial) else part
    return str(function.__name__).replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.reproduce",
        description="Try the claims of a paper again at the size of this machine. Results are kept, so that a run that "
        "was cut off continues where it stopped.",
    )
    parser.add_argument("paper", choices=PAPERS, help="paper whose claims are tried, or study of our own: per-node")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, metavar="N", help="seeds of each run (default: %(default)s)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--full", action="store_true", help="longer runs")
    length.add_argument("--quick", action="store_true", help="a look: 2 seeds, and shorter runs where they take long")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="parts whose names contain one of these")
    parser.add_argument("--fresh", action="store_true", help="run again what has results already")
    parser.add_argument("--publish", action="store_true", help="also write the table to docs/reproduce.md")
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"folder of the results (default: {FOLDER})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
