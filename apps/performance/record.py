"""The command line of a part, its JSON record and its Markdown.

A record has ``part``, ``settings``, ``environment`` and ``rows``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from apps.environment import describe
from apps.records import Record, write_record


def parser(module: str, summary: str) -> argparse.ArgumentParser:
    """Options that all parts have."""
    made = argparse.ArgumentParser(prog=f"python -m apps.performance.{module}", description=summary)
    made.add_argument("--quick", action="store_true", help="a small form that shows that everything runs")
    made.add_argument("--json", type=Path, metavar="FILE", help="where to write the record")
    return made


def publish(record: Record | None, render: Callable[[Record], str], path: Path | None) -> None:
    """Print a record's tables and write it down. None, on ranks other than 0: do nothing."""
    if record is None:
        return
    print(render(record), flush=True)
    if path is not None:
        write_record(path, record)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column to the left, the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    if any(len(line) != len(columns) for line in lines):
        raise ValueError(f"a table with the columns {list(columns)} has rows of another length")
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def footer(record: Record) -> str:
    """The line under a table that says what it was measured on."""
    settings = ", ".join(f"{key} {value}" for key, value in record["settings"].items())
    return f"\n\n<sub>{settings}. {describe(record['environment'])}.</sub>"


def replace_block(text: str, name: str, body: str) -> str:
    """Put `body` between the markers ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises
    ------
    ValueError
        The text does not have both markers once, in this order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
        raise ValueError(f"there is no one place for {name}: put the lines {begin} and {end} where its table belongs")
    return pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text)


def scaled(seconds: float, unit: float) -> str:
    """Seconds in a unit, three significant digits and no exponent."""
    value = seconds / unit
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{decimals}f}"


def both(timed: dict[str, float], unit: float) -> str:
    """Median, and the minimum in parentheses."""
    return f"{scaled(timed['median_s'], unit)} ({scaled(timed['min_s'], unit)})"
