"""Trace of one rank: its latest events, and the file that they are written to."""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from collectives.annotations import override
from collectives.atomic_file import replacing
from collectives.trace.clocks import Reading, compare_clocks, offset_at
from collectives.trace.event_format import ARGS, Event, parts_of
from collectives.trace.runs import END, Labels, TracedPayload, TracedRequests, find_labels, record_work

if TYPE_CHECKING:
    from collectives.execution.call import Call, Steps
    from collectives.execution.jobs import PieceWork
    from collectives.execution.payload import MessageStarter, Payload
    from collectives.execution.program import Program

MOST_EVENTS = 1 << 17  # 22 MB of memory along a plan, 40 MB of short calls; new events replace the oldest ones
PROGRAMS_OF_PARTS = 10_000_000  # numbers of the programs of communicators of some ranks are above it
KIND, START, CALL = 0, 2, 5  # indices of an event, as `END` and `ARGS`

_open: dict[Path, Trace] = {}
_log = logging.getLogger("collectives")


class Span:
    """Context manager that records a block."""

    __slots__ = ("_event", "_trace")

    def __init__(self, trace: Trace, event: Event) -> None:
        self._trace, self._event = trace, event

    def __enter__(self) -> None:
        self._event[START] = self._trace.clock()
        self._trace.add(self._event)

    def __exit__(self, *error: object) -> None:
        self._event[END] = self._trace.clock()


class Trace:
    """Events of one rank, kept in memory until they are written to its file.

    Each event has a kind. "call", "check", "wait", "encode", "prepare", "merge", "decode", and "local" and "node" of
    `mpicomp.PerNode`, are spans of the rank's own time, nested or disjoint. "send" and "receive" are messages, and
    "flight" are calls in the background; these overlap. If a progress thread makes the calls, the spans are of its
    time, except "call" and "exposed": these are of the calling thread, which waits in the latter. Spans whose arguments
    name a worker are of that thread's time.

    A file without events is written at once, so that a path that cannot be written raises here.

    Parameters
    ----------
    folder : Path
        Folder of the file ``rank-RANK.json``; made if it does not exist.
    rank, size : int
    clock : callable
        Clock in seconds, the same on all ranks except for an offset.

    Raises
    ------
    OSError
        The file cannot be written.
    ValueError
        Another communicator of this process writes the same file.

    Examples
    --------
    `Communicator` makes one for each rank, and writes it in `close`. A block of your own joins the calls:

    >>> import json
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import mpicomp
    >>> with TemporaryDirectory() as folder:
    ...     with mpicomp.Communicator(trace=folder) as comm:
    ...         with comm.trace.span("call", "load data"):
    ...             data = list(range(10))
    ...         comm.barrier()
    ...     events = json.loads(Path(folder, "rank-0.json").read_text())["traceEvents"]
    >>> [event["name"] for event in events if event["ph"] == "X"][:2]
    ['load data', 'barrier']
    """

    def __init__(self, folder: Path, rank: int, size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.rank, self.size, self.clock = rank, size, clock
        self.path = (folder / f"rank-{rank}.json").absolute()
        if self.path in _open:
            raise ValueError("another communicator writes its trace there")
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.add = self._events.append
        self.link = ""  # that messages are held back by, in words; "": none is emulated
        self.program = self._programs = 0  # number of the program that starts; equal on all ranks
        self.labels: dict[int, Labels] = {}  # of programs, by identity
        self.over: Event = None  # the last message that was found complete
        self.readings = [Reading(0.0, 0.0, 0.0)]  # comparisons with rank 0's clock
        self.driven_since = math.inf  # time from which the progress thread makes the calls
        self.origin = clock()  # time of rank 0's clock at which the trace begins
        self.run = 0.0  # identifies the run: rank 0's time at its beginning, in seconds since 1970
        folder.mkdir(parents=True, exist_ok=True)
        self._write()
        _open[self.path] = self

    def of_ranks(self, ranks: Sequence[int]) -> Trace:
        """Return the trace of a communicator of some ranks, whose events are among this one's; `ranks` in its order."""
        return PartTrace(self, ranks)

    def rank_of(self, peer: int) -> int:
        """Return the rank in the job of a rank of the communicator."""
        return peer

    def start_program(self, background: int | None) -> None:
        """Set the number of a program that starts: `background` if it is not None, else the next one.

        Calls in the background overtake each other, so that counting would give different numbers on the ranks.
        """
        self._programs += background is None
        self.program = self._programs if background is None else background

    def drive_by_thread(self) -> None:
        """Record that the progress thread makes the calls from now on."""
        self.driven_since = self.clock()

    def begin_wait(self, name: str) -> Event:
        """Start a wait; the file has it even if it never ends."""
        event = ["wait", name, self.clock(), None, {}, 0, 0]
        self.add(event)
        return event

    def end_wait(self, wait: Event) -> None:
        """End a wait now, and name the message that was found complete meanwhile, if there was one."""
        over = self.over
        wait[END] = self.clock()
        if over is not None and over[END] >= wait[START]:
            wait[ARGS], wait[CALL] = {"until": over[KIND], **over[ARGS]}, over[CALL]

    def span(self, kind: str, name: str = "", **args: object) -> Span:
        """Return a context manager that records a block of a `kind` as `name`, with `args` for the viewer."""
        return Span(self, [kind, name, 0.0, None, args, 0, 0])

    def phases(self, **spans: tuple[float, float]) -> None:
        """Record spans that have ended, by kind, for a vector of one piece."""
        for kind, (start, end) in spans.items():
            self.add((kind, "", start, end, {"piece": 0}, 0, 0))

    def around(self, kind: str, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `function` and records the call."""

        def recorded() -> None:
            with self.span(kind):
                function()

        return recorded

    def around_call(self, call: Call, steps: Steps) -> Steps:
        """Record a call in the background from its first step to its last."""
        with self.span("flight", call.name()):
            yield from steps

    def around_check(self, call: Call, steps: Steps, nbytes: int | None) -> Steps:
        """Record the check of a call, which may sum a vector on the way."""
        if call.background:  # known by its first step only; its spans would overlap those of other calls
            yield from steps
            return
        call.wait_name = None
        details = {} if nbytes is None else {"bytes": nbytes}
        with self.span("check", "agreement and sum" if details else "agreement", **details):
            yield from steps
        call.wait_name = ""

    def around_work(self, kind: str, work: PieceWork, label_of: Callable[[Any], dict[str, int]]) -> PieceWork:
        """Return a function that does this work on a piece or a message, and records it with the label of that."""
        return record_work(self, kind, work, label_of)

    def around_run(
        self, call: Call, program: Program, payload: Payload, requests: MessageStarter
    ) -> tuple[TracedPayload, TracedRequests]:
        """Return payload and requests of one run of a program that are recorded."""
        # programs of calls in the background get numbers that all ranks know: above those of all calls in the
        # foreground, and different for each program of a call
        self.start_program((1 << 32) + 16 * call.tag + len(call.owners) if call.background else None)
        labels = find_labels(program, self)
        return TracedPayload(self, labels, payload), TracedRequests(self, labels, requests)

    def close(self, mpi_comm: MPI.Comm, timeout_s: float) -> None:
        """Compare the clocks once more; collective."""
        self.readings.append(compare_clocks(mpi_comm, self.clock, timeout_s))

    def aligned(self, at: float) -> float:
        """Return the seconds since the trace began by rank 0's clock."""
        return at + offset_at(self.readings, at) - self.origin

    def write(self) -> None:
        """Write the file, once; no events are recorded afterwards.

        Raises
        ------
        OSError
            The file cannot be written; the message has rank, path and cure.
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
        """Write the file; its errors are logged, since they must not hide an error that is being raised."""
        try:
            self.write()
        except OSError as error:
            _log.error("%s", error)

    def discard(self) -> None:
        """Remove the file; no events are recorded."""
        del _open[self.path]
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        events = list(self._events)
        with replacing(self.path, durable=False) as file:  # readers never find half a file
            file.writelines(part.encode() for part in parts_of(self, events, len(events) < MOST_EVENTS))


class PartTrace(Trace):
    """Trace of a communicator of some `ranks`, which adds its events to the trace of the whole job."""

    def __init__(self, whole: Trace, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, tuple(ranks)
        self.rank, self.size, self.path = whole.rank, whole.size, whole.path
        self.clock, self.add = whole.clock, whole.add
        self.labels, self.readings = {}, []
        # numbers of its own, since other ranks may not run its programs
        self.program = self._programs = PROGRAMS_OF_PARTS

    @property
    def over(self) -> Event:
        """The last message that was found complete."""
        return self._whole.over

    @over.setter
    def over(self, event: Event) -> None:
        self._whole.over = event

    @override
    def rank_of(self, peer: int) -> int:
        return self._ranks[peer]

    @override
    def start_program(self, background: int | None) -> None:
        super().start_program(None if background is None else PROGRAMS_OF_PARTS + background)


def flush() -> None:
    """Write all traces of this process that are not written yet, before the process ends.

    Programs that end by ``os._exit`` call it; at any other end it is called for them. Errors are logged.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> import mpicomp
    >>> from collectives.trace import flush
    >>> with TemporaryDirectory() as folder:
    ...     comm = mpicomp.Communicator(trace=folder)
    ...     comm.barrier()
    ...     flush()
    ...     "barrier" in Path(folder, "rank-0.json").read_text()
    True
    >>> comm.close()
    """
    for trace in list(_open.values()):
        trace.save()


atexit.register(flush)
