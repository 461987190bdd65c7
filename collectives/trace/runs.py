"""Payload and requests of a traced run of a program: they record work and messages."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from collectives.annotations import Testable, override
from collectives.execution.jobs import PieceWork
from collectives.execution.payload import MergedPayload, MessageMemory, MessageStarter, Payload
from collectives.execution.program import Message, Program
from collectives.execution.workers import worker_number

if TYPE_CHECKING:
    from collectives.trace.event_format import Event
    from collectives.trace.recorder import Trace

END = 3  # index of an event


class Labels(NamedTuple):
    """Arguments of events for a program's pieces and messages; made once, and shared by all events."""

    pieces: list[dict[str, int]]
    sends: list[dict[str, int]]
    receives: list[dict[str, int]]


def find_labels(program: Program, trace: Trace) -> Labels:
    """Return a program's labels for a trace, which keeps them as long as the program lives."""
    known = trace.labels
    found = known.get(id(program))
    if found is None:
        pieces = [{"piece": number, "elements": len(cut)} for number, cut in enumerate(program.pieces)]
        for message in program.sends + program.recvs:
            pieces[message.piece]["chunk"] = message.chunk
        # the messages between two ranks are numbered, and both ranks number them in the same order
        found = known[id(program)] = Labels(
            pieces, _labels(program.sends, trace.rank_of), _labels(program.recvs, trace.rank_of)
        )
        weakref.finalize(program, known.pop, id(program), None).atexit = False
    return found


def _labels(messages: tuple[Message, ...], rank_of: Callable[[int], int]) -> list[dict[str, int]]:
    counts: dict[int, int] = {}
    made = []
    for message in messages:
        number = counts[message.peer] = counts.get(message.peer, -1) + 1
        place = {"piece": message.piece, "chunk": message.chunk, "step": message.step}
        made.append({"message": number, "peer": rank_of(message.peer), **place, "weight": message.weight})
    return made


class TracedPayload:
    """Payload whose work is recorded; a `MergedPayload` if the given one merges."""

    def __init__(self, trace: Trace, labels: Labels, payload: Payload) -> None:
        self.receive_buffers, self.brief = payload.receive_buffers, payload.brief
        self.outgoing, self.replacing = payload.outgoing, payload.replacing
        self.encode = record_work(trace, "encode", payload.encode, labels.pieces.__getitem__)
        self.finish = record_work(trace, "decode", payload.finish, labels.pieces.__getitem__)
        if payload.receive_buffers:
            merged = cast(MergedPayload, payload)

            def label_of(message: Message) -> dict[str, int]:
                return labels.receives[message.index]

            self.incoming = merged.incoming
            self.prepare = record_work(trace, "prepare", merged.prepare, label_of)
            self.merge = record_work(trace, "merge", merged.merge, label_of)


class TracedRequest(Testable):
    """Request that records the time at which it was first found complete."""

    __slots__ = ("_event", "_request", "_trace")

    def __init__(self, trace: Trace, request: Testable, event: Event) -> None:
        self._trace, self._request, self._event = trace, request, event

    @override
    def Test(self) -> bool:  # noqa: N802 - MPI's name
        if not self._request.Test():
            return False
        self._event[END] = self._trace.clock()
        self._trace.over = self._event
        return True


class TracedRequests(MessageStarter):
    """Starter of messages that records them."""

    __slots__ = ("_call", "_labels", "_requests", "_trace")

    def __init__(self, trace: Trace, labels: Labels, requests: MessageStarter) -> None:
        self._trace, self._labels, self._requests = trace, labels, requests
        self._call = trace.program

    @override
    def receive(self, key: tuple[int, int], buffer: MessageMemory, peer: int) -> TracedRequest:
        event = self._begin("receive", self._labels.receives[key[0]], buffer)
        return TracedRequest(self._trace, self._requests.receive(key, buffer, peer), event)

    @override
    def send(self, index: int, buffer: MessageMemory, peer: int) -> TracedRequest:
        event = self._begin("send", self._labels.sends[index], buffer)
        return TracedRequest(self._trace, self._requests.send(index, buffer, peer), event)

    def _begin(self, kind: str, label: dict[str, int], buffer: MessageMemory) -> Event:
        event: Event = [kind, "", self._trace.clock(), None, label, self._call, buffer[1]]
        self._trace.add(event)
        return event


def record_work(trace: Trace, kind: str, work: PieceWork, label_of: Callable[[Any], dict[str, int]]) -> PieceWork:
    """Return a function that does this work on a piece or a message, and records it with the label of that."""
    clock, add, program = trace.clock, trace.add, trace.program

    def recorded(of: object, *buffer: int) -> Testable | None:
        start = clock()
        on_device = work(of, *buffer)
        end, label, worker = clock(), label_of(of), worker_number()
        add((kind, "", start, end, {**label, "worker": worker} if worker else label, program, 0))
        return on_device

    return recorded
