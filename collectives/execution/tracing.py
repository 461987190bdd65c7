"""What stands between the executor and what it moves, and records it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast

from collectives.annotations import Testable
from collectives.execution.payload import MergedPayload, Payload
from collectives.execution.program import Message, Program
from collectives.execution.requests import Requests
from collectives.execution.workers import Work, worker_number
from collectives.trace.recorder import END, Event, Trace


class Labels(NamedTuple):
    """What a trace says of a program's pieces and messages; made once, and shared by all events."""

    pieces: list[dict[str, int]]
    sends: list[dict[str, int]]
    receives: list[dict[str, int]]


def labels_of(program: Program, known: dict[int, Labels]) -> Labels:
    """A program's labels, known for as long as it lives.

    Messages to one peer, or from it, are numbered, as both ends send and receive them.
    """
    found = known.get(id(program))
    if found is None:
        pieces = [{"piece": number, "elements": len(cut)} for number, cut in enumerate(program.pieces)]
        for message in program.sends + program.recvs:
            pieces[message.piece]["chunk"] = message.chunk
        found = known[id(program)] = Labels(pieces, _labels(program.sends), _labels(program.recvs))
        weakref.finalize(program, known.pop, id(program), None).atexit = False
    return found


def _labels(messages: tuple[Message, ...]) -> list[dict[str, int]]:
    counts: dict[int, int] = {}
    made = []
    for message in messages:
        number = counts[message.peer] = counts.get(message.peer, -1) + 1
        place = {"piece": message.piece, "chunk": message.chunk, "step": message.step}
        made.append({"message": number, "peer": message.peer, **place, "weight": message.weight})
    return made


class TracedPayload:
    """A payload whose work is recorded; see `Payload`, and `MergedPayload` where it merges."""

    def __init__(self, trace: Trace, labels: Labels, payload: Payload) -> None:
        self.receive_buffers, self.brief = payload.receive_buffers, payload.brief
        self.outgoing, self.replacing = payload.outgoing, payload.replacing
        self.encode = _recorded(trace, "encode", payload.encode, labels.pieces)
        self.finish = _recorded(trace, "decode", payload.finish, labels.pieces)
        if payload.receive_buffers:
            merged, index = cast(MergedPayload, payload), attrgetter("index")
            self.incoming = merged.incoming
            self.prepare = _recorded(trace, "prepare", merged.prepare, labels.receives, index)
            self.merge = _recorded(trace, "merge", merged.merge, labels.receives, index)


def _recorded(
    trace: Trace, kind: str, work: Work, labels: list[dict[str, int]], number: Callable[[Any], int] = int
) -> Work:
    """What does this work, and records it by the label that has the number of what it is done on."""
    clock, add, call = trace.clock, trace.add, trace.program

    def recorded(of: Any, *buffer: int) -> Testable | None:
        start = clock()
        on_device = work(of, *buffer)
        end, label, worker = clock(), labels[number(of)], worker_number()
        add((kind, "", start, end, {**label, "worker": worker} if worker else label, call, 0))
        return on_device

    return recorded


class TracedRequest:
    """A request that notes when it was first found to be over."""

    __slots__ = ("_event", "_request", "_trace")

    def __init__(self, trace: Trace, request: Testable, event: Event) -> None:
        self._trace, self._request, self._event = trace, request, event

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """See `Testable`."""
        if not self._request.Test():
            return False
        self._event[END] = self._trace.clock()
        self._trace.over = self._event
        return True


class TracedRequests(Requests):
    """Starts messages and records them."""

    __slots__ = ("_call", "_labels", "_requests", "_trace")

    def __init__(self, trace: Trace, labels: Labels, requests: Requests) -> None:
        self._trace, self._labels, self._requests = trace, labels, requests
        self._call = trace.program

    def receive(self, key: tuple[int, int], buffer: Any, peer: int) -> Any:
        """See `Requests`."""
        return self._record("receive", self._labels.receives[key[0]], buffer, self._requests.receive, key, peer)

    def send(self, index: int, buffer: Any, peer: int) -> Any:
        """See `Requests`."""
        return self._record("send", self._labels.sends[index], buffer, self._requests.send, index, peer)

    def _record(self, kind: str, label: dict[str, int], buffer: Any, start: Any, key: Any, peer: int) -> TracedRequest:
        trace = self._trace
        event = [kind, "", trace.clock(), None, label, self._call, buffer[1]]
        trace.add(event)
        return TracedRequest(trace, start(key, buffer, peer), event)


def followed(
    trace: Trace, program: Program, payload: Payload, requests: Requests
) -> tuple[TracedPayload, TracedRequests]:
    """Payload and requests of one more run of a program, recorded."""
    labels = labels_of(program, trace.labels)
    return TracedPayload(trace, labels, payload), TracedRequests(trace, labels, requests)
