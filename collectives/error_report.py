"""Report of the error that ends a rank, in one line that ``mpicomp run`` reads: it prints equal ones of ranks once."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from collectives.errors import CollectiveError, explains_itself
from collectives.launcher import parent, place_in_job

VARIABLE = "MPICOMP_ERROR_REPORTS"
"""Set by a launcher that reads the reports."""
START = b"\x1fmpicomp "
_is_wrapped = False  # by the abort hook, perhaps with hooks of other libraries between both
OURS = ("collectives", "mpicomp", "contextlib")  # whose blocks some of our errors leave
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


def shorten_traceback(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback to print, and set it on the error: the caller's lines alone if the error explains itself."""
    if not explains_itself(error) or os.environ.get("MPICOMP_TRACEBACK") == "full":
        return trace
    lines = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in OURS:
            lines.append(trace)
        trace = trace.tb_next
    kept = None
    for line in reversed(lines):
        kept = TracebackType(kept, line.tb_frame, line.tb_lasti, line.tb_lineno)
    error.__traceback__, error.__suppress_context__, error.__cause__ = kept, True, None
    return kept


def report_early() -> None:
    """Let errors before the first communicator be reported, too: the abort hook, which takes over, needs MPI."""
    if are_read() and place_in_job(os.environ) is not None and parent() is None:
        sys.excepthook = _early_hook if sys.excepthook is sys.__excepthook__ else sys.excepthook


def other_hook() -> Callable[[type[BaseException], BaseException, TracebackType | None], Any]:
    """Return the hook for uncaught exceptions; from now on that of `report_early` is Python's own."""
    global _is_wrapped
    _is_wrapped = True
    return sys.excepthook


def _early_hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _is_wrapped:
        sys.__excepthook__(kind, error, trace)
        return
    text = "".join(traceback.format_exception(kind, error, shorten_traceback(error, trace)))
    last = "".join(traceback.format_exception_only(error)).strip()
    rank, size = place_in_job(os.environ) or (0, 1)
    print(
        ErrorReport(rank, size, text, last, isinstance(error, CollectiveError)).line(),
        end="",
        file=sys.stderr,
        flush=True,
    )
