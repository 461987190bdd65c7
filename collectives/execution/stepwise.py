"""A plan run step by step: for vectors so short that there is nothing to overlap.

The pipelined executor keeps account of every piece, which takes longer than a short message. Here the messages of a
step start together and end together, and what came in is merged before the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from mpi4py import MPI

from collectives.execution.payload import Cache, MergedPayload, Payload, Requests, not_received, not_sent
from collectives.execution.program import Message, Program
from collectives.execution.tracing import AwaitedRequest, followed
from collectives.progress.polling import wait
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic


def runs_stepwise(program: Program, payload: Payload) -> bool:
    """Whether a program is to be walked; ranks that walk and ranks that execute it understand each other."""
    return payload.brief and len(program.pieces) <= program.plan.n_chunks and program.most_landing <= payload.slots


class StepwiseExecution:
    """One run of a program with no more than a piece a chunk. Parameters: see `PipelinedExecution`."""

    def __init__(
        self,
        comm: MPI.Comm,
        program: Program,
        payload: Payload,
        tag: int,
        timeout_s: float,
        traffic: Traffic,
        encoded: Callable[[], None] | None = None,
        cache: Cache | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._program, self._payload, self._timeout_s, self._traffic = program, payload, timeout_s, traffic
        self._encoded, self._requests = encoded, Requests(comm, tag, cache)
        if trace is not None:
            self._payload, self._requests = followed(trace, program, payload, self._requests, AwaitedRequest)
        self._merged = cast(MergedPayload, self._payload)  # where the program has merges
        self._last: Message | None = None

    def run(self) -> None:
        """Block until done.

        Raises
        ------
        CollectiveTimeout, PeerFailure
        """
        clock, payload, traffic = self._traffic.clock, self._payload, self._traffic
        start = clock()
        for piece in self._program.encode_order:
            payload.encode(piece)
        if self._encoded is not None and self._program.encode_order:
            self._encoded()
        encoded = clock()
        traffic.seconds_encoding += encoded - start
        for sends, recvs in self._program.steps:
            self._step(sends, recvs)
        merged = clock()
        for piece in range(len(self._program.pieces)):
            payload.finish(piece)
        end = clock()
        traffic.seconds_decoding += end - merged
        traffic.seconds_total += end - start

    def _step(self, sends: tuple[Message, ...], recvs: tuple[Message, ...]) -> None:
        clock, payload, traffic, requests = self._traffic.clock, self._merged, self._traffic, self._requests
        under_way = []
        merging: list[tuple[Message, int]] = []
        for message in recvs:
            slot = -1
            if message.held_weight:
                slot = len(merging)
                merging.append((message, slot))
                buffer = payload.incoming(message.piece, slot, message.weight)
            else:
                buffer = payload.replacing(message.piece, message.weight)
            under_way.append((requests.receive((message.index, slot), buffer, message.peer), message))
        for message in sends:
            buffer = payload.outgoing(message.piece, message.weight)
            under_way.append((requests.send(message.index, buffer, message.peer), message))
            traffic.bytes_sent += buffer[1]
            traffic.messages += 1
        posted = clock()
        for message, slot in merging:
            payload.prepare(message, slot)
        prepared = clock()
        for request, message in under_way:
            wait(request, self._timeout_s, lambda message=message: self._describe(message))  # type: ignore[misc]
            self._last = self._last if message.is_send else message
        arrived = clock()
        for message, slot in merging:
            payload.merge(message, slot)
        traffic.seconds_waiting += arrived - prepared
        traffic.seconds_merging += clock() - arrived + prepared - posted

    def _describe(self, message: Message) -> str:
        plan = self._program.plan
        here = f"rank {plan.rank} of {plan.size}"
        return not_sent(here, message) if message.is_send else not_received(here, message, self._last)
