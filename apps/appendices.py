"""Appendices of the documentation, whose tables are made of the records in ``docs/records``.

``python -m apps.appendices`` writes the tables of all records into their pages; with ``--take`` it writes the records
of the pages instead, after a page was edited. The programs that measure put a new table into its record and its page at
once, by `publish`. A record is a JSON file with the tables and lines of text of one place in a page. Seconds of single
calls are in the records of `runs` alone, which a table is made of.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from apps.launch import PROJECT
from collectives.atomic_file import replacing

PAGES = tuple(PROJECT / "docs" / name for name in ("chaos.md", "churn.md", "performance-tables.md", "reproduce.md"))

Table: TypeAlias = dict[str, list[str] | list[list[str]]]
"""``columns``, their ``alignment`` ("left" or "right") and ``rows`` of cells, which are Markdown."""
Content: TypeAlias = list[str | Table]

_BORDERS = {"left": "---", "right": "---:"}


def publish(page: Path, name: str, body: str) -> None:
    """Put the Markdown `body` into its place in a page, and into its record where `page` is an appendix."""
    # the page has exactly one place of this name, or this raises ValueError
    text = replace_block(page.read_text(), name, body)
    if page in PAGES:
        _write(record_of(page, name), to_json(parse(body)))
    _write(page, text)


def record_of(page: Path, name: str) -> Path:
    """Return the file of a record."""
    return page.parent / "records" / page.stem / f"{name}.json"


def generate(page: Path) -> str:
    """Return the text of a page with the tables of all its records."""
    text = page.read_text()
    for path in sorted((page.parent / "records" / page.stem).glob("*.json")):
        text = replace_block(text, path.stem, render(json.loads(path.read_text())))
    return text


def parse(body: str) -> Content:
    """Return the tables and texts of Markdown, in order."""
    content: Content = []
    for part in re.split(r"\n\n+", body.strip("\n")):
        lines = part.splitlines()
        if not lines[0].startswith("|"):
            content.append(part)
            continue
        columns, borders, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
        alignment = ["right" if border.endswith(":") else "left" for border in borders]
        content.append({"columns": columns, "alignment": alignment, "rows": rows})
    return content


def render(content: Content) -> str:
    """Return the Markdown of tables and texts."""
    return "\n\n".join(part if isinstance(part, str) else _markdown(part) for part in content)


def to_json(content: Content) -> str:
    """Return JSON with a line for each row of a table."""
    parts = [json.dumps(part, ensure_ascii=False) if isinstance(part, str) else _json(part) for part in content]
    return "[\n" + ",\n".join(parts) + "\n]\n"


def replace_block(text: str, name: str, body: str) -> str:
    """Put `body` between the markers ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, which must occur once."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if text.count(begin) != 1 or text.count(end) != 1 or not pattern.search(text):
        raise ValueError(f"there is no one place for {name}: put the lines {begin} and {end} where its table belongs")
    return pattern.sub(lambda _: f"{begin}\n{body}\n{end}", text)


def take(page: Path) -> list[Path]:
    """Write the records of all places of a page; return their files."""
    places = re.findall(r"^<!-- begin (\S+) -->\n(.*?)\n<!-- end \1 -->$", page.read_text(), re.MULTILINE | re.DOTALL)
    for name, body in places:
        _write(record_of(page, name), to_json(parse(body)))
    return [record_of(page, name) for name, _ in places]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or the records; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m apps.appendices", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--take", action="store_true", help="write the records of the pages, not the pages")
    options = parser.parse_args(argv)
    for page in PAGES:
        if options.take:
            print(f"wrote {len(take(page))} records of {page.name}")
        else:
            _write(page, generate(page))
            print(f"wrote {page.name}")
    return 0


def _markdown(table: Table) -> str:
    borders = [_BORDERS[str(alignment)] for alignment in table["alignment"]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (table["columns"], borders, *table["rows"]))


def _json(table: Table) -> str:
    columns, alignment = (json.dumps(table[key], ensure_ascii=False) for key in ("columns", "alignment"))
    head = f' "columns": {columns},\n "alignment": {alignment},\n'
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in table["rows"])
    return f'{{\n{head} "rows": [\n{rows}\n ]\n}}'


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


if __name__ == "__main__":
    sys.exit(main())
