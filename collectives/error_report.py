"""Report of the error that ends a rank, in one line that ``mpicomp run`` reads: it prints equal ones of ranks once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import NamedTuple

VARIABLE = "MPICOMP_ERROR_REPORTS"
"""Set by a launcher that reads the reports."""
START = b"\x1fmpicomp "
MOST_BYTES = 3000  # a launcher passes on longer lines in parts, between those of other ranks


class ErrorReport(NamedTuple):
    """Error of a rank.

    Attributes
    ----------
    text : str
        Traceback; empty where it is too long, and was printed.
    last : str
        Type and message.
    follows : bool
        The error is one of communicating: another rank's may be its cause.
    """

    rank: int
    size: int
    text: str
    last: str
    follows: bool

    def line(self) -> str:
        """Return the line to print, and before it a text that is too long for it."""
        line = f"{START.decode()}{json.dumps(self)}\n"
        if len(line) <= MOST_BYTES:
            return line
        return self.text + self._replace(text="", last=self.last[: MOST_BYTES // 4]).line()


def are_read(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this job's launcher reads reports."""
    return bool(environ.get(VARIABLE))


def parse(line: str) -> ErrorReport | None:
    """Return the report in a line; None for a line without a report, or with a part of one."""
    if not line.startswith(START.decode()):
        return None
    try:
        rank, size, text, last, follows = json.loads(line[len(START) :])
        return ErrorReport(int(rank), int(size), str(text), str(last), bool(follows))
    except (ValueError, TypeError):
        return None
