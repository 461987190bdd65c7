"""Examples of a page: its blocks of code, and the code in tables with a column "here"."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.documents import inline_code, pieces

Names = dict[str, Any]


def run(document: Path, look: Callable[[str, Any, Names], None] | None = None) -> Names:
    """Run a page from top to bottom, as its reader would, and return its names.

    Before each row of a table the block of code above the table runs once more, so that all rows begin alike.

    Parameters
    ----------
    document
        README, or a page of the docs.
    look
        Called after each row with the last of its code, the value of this (None of a statement), and the page's names.
    """
    names: Names = {"__name__": f"example in {document.name}"}
    sys.modules[names["__name__"]] = type(sys)(names["__name__"])  # where dataclasses look for their module
    above = ""
    try:
        for number, piece in enumerate(pieces(document), 1):
            if isinstance(piece, str):
                above = piece
                _value(above, f"{document.name}, example {number}", names)
                continue
            for there, here, *_ in piece:
                codes = inline_code(here)
                if codes:
                    where = f"{document.name}, row {there}"
                    values = [_value(code, where, names) for code in (above, *codes)]
                    if look is not None:
                        look(codes[-1], values[-1], names)
    finally:
        del sys.modules[names["__name__"]]
    return names


def _value(code: str, where: str, names: Names) -> Any:
    """Run code; returns its value if it is an expression."""
    try:
        expression = compile(code, where, "eval", dont_inherit=True)
    except SyntaxError:
        return exec(compile(code, where, "exec", dont_inherit=True), names)
    return eval(expression, names)
