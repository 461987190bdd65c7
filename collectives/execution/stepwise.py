"""Executor that runs a program step by step, for vectors so short that there is nothing to overlap.

The pipelined executor tracks the state of every piece, which takes longer than a short message. Here the messages of a
round start together and end together, and all of them are merged before the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from mpi4py import MPI

from collectives.annotations import Testable
from collectives.errors import PeerFailure
from collectives.execution.call import Call, Steps
from collectives.execution.payload import MergedPayload, MessageStarter, Payload, not_received, not_sent
from collectives.execution.program import Message, Program
from collectives.execution.staged import until_queued
from collectives.execution.traffic import Traffic
from collectives.progress.polling import until


class StepwiseExecution:
    """One run of a program with at most one piece per chunk; the parameters are those of `pipelined.execute`."""

    def __init__(
        self,
        program: Program,
        payload: Payload,
        requests: MessageStarter,
        traffic: Traffic,
        encoded: Callable[[], None] | None,
    ) -> None:
        self._program, self._payload, self._traffic = program, payload, traffic
        self._encoded, self._requests = encoded, requests
        self._merged = cast(MergedPayload, self._payload)  # used if the program merges
        self._last: Message | None = None
        self._under_way: list[tuple[Testable, Message]] = []

    def steps(self, call: Call) -> Steps:
        """Run the program as part of a call.

        Raises
        ------
        PeerFailure
        """
        clock, payload, traffic = self._traffic.clock, self._payload, self._traffic
        start = clock()
        for piece in self._program.encode_order:
            if (handle := payload.encode(piece)) is not None:
                yield from until(handle, call)
        if self._encoded is not None and self._program.encode_order:
            self._encoded()
        encoded = clock()
        traffic.seconds_encoding += encoded - start
        for sends, recvs in self._program.steps:
            yield from self._round(call, sends, recvs)
        merged = clock()
        last = len(self._program.pieces) - 1
        for piece in range(last + 1):
            if (handle := payload.finish(piece)) is not None:
                yield from until(handle, call) if piece < last else until_queued(call, handle)
        end = clock()
        traffic.seconds_decoding += end - merged
        traffic.seconds_total += end - start

    def _round(self, call: Call, sends: tuple[Message, ...], recvs: tuple[Message, ...]) -> Steps:
        clock, payload, traffic, requests = self._traffic.clock, self._merged, self._traffic, self._requests
        under_way = self._under_way = []
        merging: list[tuple[Message, int]] = []
        for message in recvs:
            number = -1
            if message.held_weight:
                number = len(merging)
                merging.append((message, number))
                buffer = payload.incoming(message.piece, number, message.weight)
            else:
                buffer = payload.replacing(message.piece, message.weight)
            under_way.append((requests.receive((message.index, number), buffer, message.peer), message))
        for message in sends:
            buffer = payload.outgoing(message.piece, message.weight)
            under_way.append((requests.send(message.index, buffer, message.peer), message))
            traffic.bytes_sent += buffer[1]
            traffic.messages += 1
        posted = clock()
        for message, number in merging:
            payload.prepare(message, number)
        prepared = clock()
        try:
            for request, message in under_way:
                if not request.Test():
                    call.describe = partial(self._describe, message)
                    yield from until(request, call)
                self._last = self._last if message.is_send else message
        except MPI.Exception as error:
            raise PeerFailure(f"{self._describe(message)}: MPI says {error}") from error
        arrived = clock()
        for handle in [payload.merge(message, number) for message, number in merging]:
            if handle is not None:
                yield from until(handle, call)
        traffic.seconds_waiting += arrived - prepared
        traffic.seconds_merging += clock() - arrived + prepared - posted

    def _describe(self, message: Message) -> str:
        plan = self._program.plan
        here = f"rank {plan.rank} of {plan.size}"
        return not_sent(here, message) if message.is_send else not_received(here, message, self._last)
