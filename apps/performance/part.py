"""A part of the measurements: its command line, its JSON record and its Markdown table.

A record has ``settings``, ``environment`` and ``rows``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.environment import describe, environment
from apps.records import Record, write_record
from collectives import Communicator
from collectives.arrays.elements import aligned_empty

US, MS = 1e-6, 1e-3
STAGES = {
    "encode": "seconds_encoding", "merge": "seconds_merging", "decode": "seconds_decoding", "wait": "seconds_waiting"
}  # fmt: skip
"""Fields of `Traffic` by what a table calls them."""
Row = dict[str, Any]
Column = tuple[str, Callable[[Any], str]]
"""Heading, and what makes a cell of a row."""


@dataclass(frozen=True)
class Part:
    """Measurement of one module of this package."""

    module: str
    summary: str
    # called with quick or full; returns a record, or None on ranks other than 0
    measure: Callable[..., Record | None]
    columns: Sequence[Column] | Callable[[Record], Sequence[Column]]
    quick: Mapping[str, Any]
    full: Mapping[str, Any]
    note: Callable[[Record], str] = lambda record: ""  # between the table and its footer
    ranks: tuple[int, ...] = ()  # numbers of ranks to measure with; none: without ``mpirun``

    def render(self, record: Record) -> str:
        """Markdown."""
        columns = self.columns(record) if callable(self.columns) else self.columns
        settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
        return (
            f"{table(columns, record['rows'])}{self.note(record)}\n\n"
            f"<sub>{settings}. {describe(record['environment'])}.</sub>"
        )

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the program: print the table and write the record. Returns the exit status."""
        if self.ranks:
            mpicomp.install_abort_hook()
        parser = argparse.ArgumentParser(prog=f"python -m apps.performance.{self.module}", description=self.summary)
        parser.add_argument("--quick", action="store_true", help="a small form that shows that everything runs")
        parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
        options = parser.parse_args(argv)
        record = self.measure(**(self.quick if options.quick else self.full))
        if record is not None:
            print(self.render(record), flush=True)
            if options.json is not None:
                write_record(options.json, record)
        return 0


def make_record(rows: Sequence[Row], **settings: Any) -> Record:
    """A record. Call it while the vectors exist: their pages are counted."""
    return {"settings": settings, "environment": environment(), "rows": rows}


def against(key: str, name: str, reference: str, target: str, timed: Mapping[str, Mapping[str, float]]) -> Row:
    """A row that holds the minimum of a call, named by `key`, against that of another."""
    reference_s = timed[reference]["min_s"]
    return {key: name, "reference": reference, "target": target, **timed[name], "reference_s": reference_s,
            "ratio": timed[name]["min_s"] / reference_s}  # fmt: skip


def vectors(n: int, comm: Communicator | None = None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Normal values of a rank, and zeros; both begin at multiples of 64 bytes."""
    x, out = aligned_empty(n, np.float32, 64), aligned_empty(n, np.float32, 64)
    np.random.default_rng((0, 0 if comm is None else comm.rank)).standard_normal(n, np.float32, out=x)
    out[:] = 0
    return x, out


def table(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    headings = [heading for heading, _ in columns]
    lines = [headings, ["---", *["---:"] * (len(columns) - 1)], *([cell(row) for _, cell in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def get(key: str, spec: str = "") -> Callable[[Row], str]:
    """Make cells of a field of the rows, in a format."""
    return lambda row: format(row[key], spec)


def in_unit(key: str, unit: float) -> Callable[[Row], str]:
    """Make cells of a field that holds seconds."""
    return lambda row: format_seconds(row[key], unit)


def format_seconds(seconds: float, unit: float) -> str:
    """Seconds in a unit, three significant digits and no exponent."""
    value = seconds / unit
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{decimals}f}"


def both(timed: Mapping[str, float], unit: float) -> str:
    """Median, and the minimum in parentheses."""
    return f"{format_seconds(timed['median_s'], unit)} ({format_seconds(timed['min_s'], unit)})"


def choose_from(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Return a reader of an option that takes some of these names, with commas."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise argparse.ArgumentTypeError(f"{unknown!r} is none of {', '.join(known)}")
        return names

    return read
