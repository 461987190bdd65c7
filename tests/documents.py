"""README and docs as tests read them: code blocks, tables, inline code, links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    *(PROJECT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((PROJECT / "docs").glob("*.md")),
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PIECE = re.compile(_BLOCK.pattern + r"|((?:^\|[^\n]*\n)+)", re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    return [code for found, code in _BLOCK.findall(document.read_text()) if found == language]


def commands(document: Path) -> list[str]:
    """The lines of the shell blocks."""
    return [line for block in blocks(document, "sh") for line in block.splitlines() if line]


def prose(document: Path) -> str:
    """The text without fenced code blocks."""
    return _BLOCK.sub("", document.read_text())


def rows(document: Path) -> list[list[str]]:
    """The cells of all table rows."""
    return _cells("\n".join(line for line in prose(document).splitlines() if line.startswith("|")))


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def tables(document: Path) -> dict[str, list[list[str]]]:
    """Return the rows of all tables without their heads, by the first cell of the head."""
    found: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", prose(document) + "\n", re.MULTILINE):
        head, _, *body = _cells(block)
        found.setdefault(head[0], []).extend(body)
    return found


def pieces(document: Path) -> Iterator[str | list[list[str]]]:
    """Return a reader's code: Python blocks, the new lines of a diff, and rows of tables with "here" as second head."""
    for language, code, table in _PIECE.findall(document.read_text()):
        if language == "python":
            yield code
        elif language == "diff":
            yield "".join(line[1:] or line for line in code.splitlines(True) if not line.startswith("-"))
        elif table:
            head, _, *body = _cells(table)
            if head[1:2] == ["here"]:
                yield body


def inline_code(text: str) -> list[str]:
    """Return the texts between backquotes."""
    return re.findall(r"`([^`\n]+)`", text)


def anchors(document: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document: Path) -> list[str]:
    """Targets of the links."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(document))
