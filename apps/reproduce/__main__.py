"""``python -m apps.reproduce PAPER``: a paper's claims beside what is found here, as JSON, plots and a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from apps.reproduce.claims import Claim, table
from apps.reproduce.results import Book

PAPERS = {"doublesqueeze": "doublesqueeze", "ecq-sgd": "ecq_sgd", "marsit": "marsit", "scalecom": "scalecom"}
FOLDER = Path("runs") / "reproduce"
SEEDS = 10

Run = Callable[[Book, int, bool], tuple[list[Claim], list[Path]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status: 1 where a claim was not found again."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.seeds < 2:
        parser.error(f"--seeds {options.seeds}: a difference needs 2 or more")
    book = Book((options.folder or FOLDER) / options.paper, options.fresh)
    run: Run = import_module(f"apps.reproduce.{PAPERS[options.paper]}").run
    claims, figures = run(book, options.seeds, options.full)
    text = table(claims)
    (book.folder / "table.md").write_text(text)
    print(text)
    for path in (*figures, book.folder / "table.md"):
        print(f"wrote {path}")
    failed = sum(claim.holds is False for claim in claims)
    judged = sum(claim.holds is not None for claim in claims)
    print(f"{judged - failed} of {judged} claims found again; {book.seconds():.0f} s of computing")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m apps.reproduce",
        description="Try a paper's claims again at the size of this machine. What is done is kept, so a run that was "
        "cut off goes on where it stopped.",
    )
    parser.add_argument("paper", choices=sorted(PAPERS), help="which")
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="of each run (%(default)s)")
    parser.add_argument("--full", action="store_true", help="longer runs")
    parser.add_argument("--fresh", action="store_true", help="do again what is done")
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"of the results ({FOLDER})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
