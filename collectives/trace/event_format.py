"""Lines of a trace's file in the Trace Event Format."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collectives.trace.recorder import Trace

ARGS = 4  # index of an event

Event: TypeAlias = Any
"""(kind, name, start, end, args, call, bytes), with times of a rank's clock; a list if the end is set later."""


def parts_of(trace: Trace, events: Sequence[Event], is_complete: bool) -> Iterator[str]:
    """Yield the parts of the file of a trace, with these events: all of them, or the newest ones."""
    about = {
        "rank": trace.rank,
        "ranks": trace.size,
        "run": trace.run,
        "link": trace.link,
        "host": platform.node(),
        "complete": is_complete,
        "clock": [reading._asdict() for reading in trace.readings],
    }
    yield f'{{"displayTimeUnit": "ns", "otherData": {_json(about)},\n"traceEvents": [\n'
    yield ",\n".join(map(_json, _names(trace, events)))
    now = trace.clock()
    for number, event in enumerate(events):
        for line in _lines(trace, event, number, now):
            yield ",\n" + _json(line)
    yield "\n]}\n"


def _names(trace: Trace, events: Sequence[Event]) -> Iterator[dict[str, object]]:
    names = [("process_name", 0, f"rank {trace.rank} on {platform.node()}"), ("thread_name", 0, "calls")]
    if trace.driven_since < math.inf:
        names.append(("thread_name", 1, "progress thread"))
    workers = max((event[ARGS].get("worker", 0) for event in events), default=0)
    names += [("thread_name", 1 + worker, f"worker {worker}") for worker in range(1, workers + 1)]
    for key, thread, name in names:
        yield {"ph": "M", "name": key, "pid": trace.rank, "tid": thread, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "tid": 0, "args": {"sort_index": trace.rank}}


def _lines(trace: Trace, event: Event, number: int, now: float) -> Iterator[dict[str, object]]:
    """Yield the lines of the file for an event."""
    kind, name, start, end, args, call, nbytes = event
    begun = _nanoseconds(trace.aligned(start))
    ended = _nanoseconds(trace.aligned(now if end is None else end))
    more = {"call": call, **args} if call else args
    if end is None:
        more = {**more, "finished": False}
    driven = start >= trace.driven_since and kind not in ("call", "exposed")
    worker = args.get("worker", 0)
    where = {"cat": kind, "pid": trace.rank, "tid": 1 + worker if worker else int(driven)}
    if kind in ("send", "receive"):
        name, more = f"{'to' if kind == 'send' else 'from'} rank {args['peer']}", {**more, "bytes": nbytes}
    elif kind != "flight":
        # whole nanoseconds, since rounding could make nested spans overlap
        times = {"ts": begun / 1e3, "dur": (ended - begun) / 1e3}
        yield {"ph": "X", "name": name or kind, **where, **times, "args": more}
        return
    # Messages and calls in flight overlap, which only asynchronous events may; those of one name share a track.
    where |= {"name": name, "id": hex((trace.rank << 32) + number)}
    yield {"ph": "b", **where, "ts": begun / 1e3, "args": more}
    yield {"ph": "e", **where, "ts": ended / 1e3}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _json(line: dict[str, object]) -> str:
    return json.dumps(line, default=str)  # arguments of spans may be any objects of callers
