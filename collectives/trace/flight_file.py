"""Content of a flight recorder's file: records of calls, the waits of those in flight, and stacks of all threads."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

from collectives.quoting import one_line

if TYPE_CHECKING:
    from collectives.execution.call import Call
    from collectives.trace.flight_recorder import RecordedGroup

FORMAT = 1
MOST_FRAMES = 100  # of a stack, the innermost ones
_OWN = (__name__, "collectives.trace.flight_recorder")  # modules that write the file
GROUP, NUMBER, LABEL, STEP, BEGUN, COMPARED, ENDED, ERROR = range(8)  # indices of a record

Record: TypeAlias = list[Any]
"""[group, number, label, step, time begun, time compared or 0, time ended or 0, name of the error or None]"""

_ARRAY = re.compile(r"\b(bool|u?int\d+|b?float\d+|complex\d+)\[([\d, ]*)\]")


def content_of(
    place: tuple[int, int],
    records: Sequence[Record],
    known: Iterable[RecordedGroup],
    reason: str,
    missing: Sequence[int],
) -> dict[str, Any]:
    """Return the content of the file of a rank at a place among all.

    `known` are communicators, also without a record. The ranks that are `missing` have not come to a call.
    """
    groups = list({id(one): one for one in (*known, *(record[GROUP] for record in records))}.values())
    numbers = {id(group): number for number, group in enumerate(groups)}
    in_flight = {id(call.note): call for group in groups for call in group.in_flight()}
    texts: dict[str, int] = {}
    calls = [_describe_call(record, numbers, texts, in_flight.get(id(record))) for record in records]
    return {
        "format": FORMAT,
        "reason": reason,
        "rank": place[0],
        "ranks": place[1],
        "host": platform.node(),
        "pid": os.getpid(),
        "version": str(getattr(sys.modules.get("mpicomp"), "__version__", "")),
        "python": platform.python_version(),
        "clock": {"monotonic": time.perf_counter(), "wall": time.time()},
        "missing": list(missing),
        "communicators": [
            {"key": one.key, "rank": one.rank, "members": list(one.members), "begun": one.begun} for one in groups
        ],
        "texts": list(texts),
        "calls": calls,
        "threads": _stacks(),
    }


def _describe_call(record: Record, groups: dict[int, int], texts: dict[str, int], call: Call | None) -> dict[str, Any]:
    """Return an entry of the file; `groups` and `texts` number communicators and descriptions, `call` is in flight."""
    text = _text(record[LABEL])
    found = _ARRAY.search(text)
    shape = [int(part) for part in found[2].split(",") if part.strip()] if found else []
    one = {
        "communicator": groups.get(id(record[GROUP]), -1),
        "call": record[NUMBER],
        "text": texts.setdefault(text, len(texts)),
        "step": record[STEP],
        "dtype": found[1] if found else "",
        "shape": shape,
        "bytes": math.prod(shape) * int("".join(filter(str.isdigit, found[1])) or 8) // 8 if found else 0,
        "begun": record[BEGUN],
        "compared": record[COMPARED],
        "ended": record[ENDED],
        "state": _state(record),
    }
    if record[ERROR]:
        one["error"] = record[ERROR]
    if call is not None and not record[ENDED]:
        one["number"] = call.number  # in messages
        one["waits_for"] = _describe_wait(call)
        one["stalled_s"] = call.stalled_s
    return one


def _text(label: Callable[[], str] | str) -> str:
    try:
        return label if isinstance(label, str) else str(label())
    except Exception as error:  # noqa: BLE001 - a description that fails must not keep the others from the file
        return f"a call whose description fails ({one_line(error)})"


def _describe_wait(call: Call) -> str:
    try:
        return str(call.describe())
    except Exception as error:  # noqa: BLE001 - as above
        return f"unknown ({one_line(error)})"


def _state(record: Record) -> str:
    if record[ERROR]:
        return "failed"
    return "ended" if record[ENDED] else "compared" if record[COMPARED] else "begun"


def _stacks() -> list[dict[str, Any]]:
    """Return the Python stack of each thread, innermost line first."""
    known: dict[int, threading.Thread] = getattr(threading, "_active", {})  # `threading.enumerate` takes a lock
    names, main = {number: thread.name for number, thread in known.copy().items()}, threading.main_thread().ident
    found = []
    for number, top in sys._current_frames().items():
        frame: FrameType | None = top
        lines = list[str]()
        while frame is not None and len(lines) < MOST_FRAMES:
            if frame.f_globals.get("__name__") not in _OWN:
                lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        found.append({"name": names.get(number, f"thread {number}"), "main": number == main, "stack": lines})
    return sorted(found, key=lambda one: not one["main"])
