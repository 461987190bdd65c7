"""The newest events of one rank, and the file that they are written to."""

from __future__ import annotations

import atexit
import json
import logging
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from collectives.trace.clock import Reading, offset_at

MOST_EVENTS = 1 << 17  # 22 MB of memory along a plan, 40 MB of short calls; older ones give way to newer ones
KIND, START, END, ARGS, CALL = 0, 2, 3, 4, 5  # where an event has what

# (kind, name, start, end, args, call, bytes): times by this rank's clock, a list where the end comes later
Event = Any

_open: dict[Path, Trace] = {}
_log = logging.getLogger("collectives")


class Span:
    """A block that is recorded."""

    __slots__ = ("_event", "_trace")

    def __init__(self, trace: Trace, event: Event) -> None:
        self._trace, self._event = trace, event

    def __enter__(self) -> None:
        self._event[START] = self._trace.clock()
        self._trace.add(self._event)

    def __exit__(self, *error: object) -> None:
        self._event[END] = self._trace.clock()


class Trace:
    """What happens when on one rank, kept in memory until it is written.

    Every event is one of a kind: "call", "check", "wait", "encode", "prepare", "merge" and "decode" are spans of the
    rank's own time, which lie within each other or apart; "send" and "receive" are messages and "flight" are calls in
    the background, which overlap. Where a progress thread makes the calls, these spans are of its time, but "call" and
    "exposed" are of the caller's, who waits in the latter. Spans whose arguments name a worker are of that thread's
    time.

    The file is begun at once.

    Raises
    ------
    OSError
        The file cannot be written.
    ValueError
        Another communicator of this process writes there.
    """

    def __init__(self, folder: Path, rank: int, size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self.path = (folder / f"rank-{rank}.json").absolute()
        if self.path in _open:
            raise ValueError("another communicator writes its trace there")
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.add = self._events.append  # takes an event
        self.program = self._programs = 0  # number of what is being started; the same on all ranks at the same message
        self.labels: dict[int, Any] = {}  # of programs, by identity; see `collectives.execution.tracing`
        self.over: Event = None  # the message that was the last to be found over
        self.readings = [Reading(0.0, 0.0, 0.0)]  # how far rank 0's clock is ahead
        self.driven_since = math.inf  # by the clock: from then on the progress thread makes the calls
        self.origin = clock()  # rank 0's clock where the trace begins
        self.run = 0.0  # tells traces of one run from another's: when it began, in seconds since 1970, by rank 0
        folder.mkdir(parents=True, exist_ok=True)
        self._write()
        _open[self.path] = self

    def start_program(self, background: int | None) -> None:
        """Number a program that starts; of a call that others overtake, by a number that all ranks know it by."""
        self._programs += background is None
        self.program = self._programs if background is None else background

    def begin(self, kind: str, name: str = "", **args: Any) -> Event:
        """Start a span, which the file shows even if it never ends."""
        event = [kind, name, self.clock(), None, args, 0, 0]
        self.add(event)
        return event

    def end_wait(self, wait: Event) -> None:
        """End a wait: by the message that was found to be over meanwhile, if there was one, and else now."""
        over = self.over
        wait[END] = self.clock()
        if over is not None and over[END] >= wait[START]:
            wait[ARGS], wait[CALL] = {"until": over[KIND], **over[ARGS]}, over[CALL]

    def span(self, kind: str, name: str = "", **args: Any) -> Span:
        """Record a block: what is returned is to be entered by ``with``."""
        return Span(self, [kind, name, 0.0, None, args, 0, 0])

    def phases(self, **spans: tuple[float, float]) -> None:
        """Record spans that are over, by kind, of a vector that is one piece."""
        for kind, (start, end) in spans.items():
            self.add((kind, "", start, end, {"piece": 0}, 0, 0))

    def around(self, kind: str, function: Callable[[], None]) -> Callable[[], None]:
        """A function whose calls are recorded."""

        def recorded() -> None:
            with self.span(kind):
                function()

        return recorded

    def aligned(self, at: float) -> float:
        """Seconds since the trace began, by rank 0's clock."""
        return at + offset_at(self.readings, at) - self.origin

    def write(self) -> None:
        """Write the file, once; nothing is recorded afterwards.

        Raises
        ------
        OSError
            It cannot be written; says which rank's, where, and what to do.
        """
        if _open.get(self.path) is self:
            del _open[self.path]
            try:
                self._write()
            except OSError as error:
                here = f"rank {self.rank} of {self.size}: the trace {self.path} cannot be written"
                raise OSError(f"{here} ({error.strerror or error}); make room there or name another folder") from error
            finally:
                self._events.clear()
                self.labels.clear()

    def save(self) -> None:
        """Write the file; what hinders it is logged, as it must not hide an error that is under way."""
        try:
            self.write()
        except OSError as error:
            _log.error("%s", error)

    def discard(self) -> None:
        """Remove the file; nothing is to be recorded."""
        del _open[self.path]
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        try:
            with part.open("w") as file:
                self._dump(file)
            part.replace(self.path)  # at no time is there half a file
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _dump(self, file: TextIO) -> None:
        events = list(self._events)
        about = {
            "rank": self.rank,
            "ranks": self.size,
            "run": self.run,
            "host": platform.node(),
            "complete": len(events) < MOST_EVENTS,
            "clock": [reading._asdict() for reading in self.readings],
        }
        file.write(f'{{"displayTimeUnit": "ns", "otherData": {_json(about)},\n"traceEvents": [\n')
        file.write(",\n".join(map(_json, self._names(events))))
        now = self.clock()
        for number, event in enumerate(events):
            for line in self._lines(event, number, now):
                file.write(",\n" + _json(line))
        file.write("\n]}\n")

    def _names(self, events: list[Event]) -> Iterator[dict[str, Any]]:
        names = [("process_name", 0, f"rank {self.rank} on {platform.node()}"), ("thread_name", 0, "calls")]
        if self.driven_since < math.inf:
            names.append(("thread_name", 1, "progress thread"))
        workers = max((event[ARGS].get("worker", 0) for event in events), default=0)
        names += [("thread_name", 1 + worker, f"worker {worker}") for worker in range(1, workers + 1)]
        for key, thread, name in names:
            yield {"ph": "M", "name": key, "pid": self.rank, "tid": thread, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": self.rank, "tid": 0, "args": {"sort_index": self.rank}}

    def _lines(self, event: Event, number: int, now: float) -> Iterator[dict[str, Any]]:
        """What stands for an event in the file."""
        kind, name, start, end, args, call, nbytes = event
        begun = _nanoseconds(self.aligned(start))
        ended = _nanoseconds(self.aligned(now if end is None else end))
        more = {"call": call, **args} if call else args
        if end is None:
            more = {**more, "finished": False}
        driven = start >= self.driven_since and kind not in ("call", "exposed")
        worker = args.get("worker", 0)
        where = {"cat": kind, "pid": self.rank, "tid": 1 + worker if worker else int(driven)}
        if kind == "flight":  # calls in flight overlap too, and each has a track of its own
            where |= {"name": name, "id": hex((self.rank << 32) + number)}
            yield {"ph": "b", **where, "ts": begun / 1e3, "args": more}
            yield {"ph": "e", **where, "ts": ended / 1e3}
            return
        if kind not in ("send", "receive"):
            # in whole nanoseconds, so that spans within each other stay so
            times = {"ts": begun / 1e3, "dur": (ended - begun) / 1e3}
            yield {"ph": "X", "name": name or kind, **where, **times, "args": more}
            return
        # Messages overlap, which only asynchronous events may; those of one name share a track.
        name = f"{'to' if kind == 'send' else 'from'} rank {args['peer']}"
        where |= {"name": name, "id": hex((self.rank << 32) + number)}
        yield {"ph": "b", **where, "ts": begun / 1e3, "args": {**more, "bytes": nbytes}}
        yield {"ph": "e", **where, "ts": ended / 1e3}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _json(what: dict[str, Any]) -> str:
    return json.dumps(what, default=str)  # what callers hand over may be anything


def flush() -> None:
    """Write all traces of this process that are not written yet; for when it is about to end."""
    for trace in list(_open.values()):
        trace.save()


atexit.register(flush)
