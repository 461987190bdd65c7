"""Codes that can only be gathered: every rank's go to every rank, which adds them up in rank order.

Sums of codes are no codes, so every rank gets every rank's. They flow piece by piece, once round the ring, while later
pieces are encoded and earlier ones summed. Where the topology is a star, a server gets the codes instead, adds them up
and sends the mean back in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.gather_program import gather_program
from collectives.execution.partition import pieces
from collectives.execution.program import Program
from collectives.schedules.all_gather import AllGather as Route
from collectives.schedules.star import Star
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel, Parts, VectorSpec
from mpicomp.codecs.base import Codec, sent_bytes, varies
from mpicomp.codecs.error_feedback import ErrorRule, FeedbackEncoder, take_mean
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedRounds, Residuals, ResultWriter, buffers, piece_elements
from mpicomp.reducers.two_pass import TwoPass, TwoPassPayload, route

BRIEF_ELEMENTS = 1 << 14  # up to here encoding takes less than keeping account of pieces


def all_gather(comm: Communicator, spec: VectorSpec, codec: Codec, feedback: ErrorRule | None, seed: int = 0) -> Parts:
    """Feedback x codec x all-gather, or over a star x two passes, the second in full precision."""
    star, back = isinstance(comm.topology, Star), FullPrecision(spec.dtype)
    longest = piece_elements(codec, spec.n, comm.packed_piece_bytes(), back if star else None)
    if star:
        program = comm.program(route(comm), spec.n, codec.alignment, longest)
    else:
        program = gather_program(comm.rank, comm.size, pieces(range(spec.n), longest, codec.alignment))
    stream, here = Stream(seed, spec.vector_id, "code"), (spec.n, spec.compute, program.longest_piece)
    encoder = FeedbackEncoder(codec, feedback, *here, stream, comm.rank)
    errors, writer = Residuals({"residual": encoder}, {"residual": "mean"}), ResultWriter(spec.dtype, spec.sixteen_bit)
    exchange: TwoPass | AllGather
    if star:
        root = FeedbackEncoder(back, None, *here, stream, 0)
        exchange = TwoPass(comm, program, TwoPassPayload(program, encoder, root, writer), tell_at_once=True)
    else:
        exchange = AllGather(comm, program, AllGatherPayload(program, encoder, writer))
    return Parts(errors, codec, CodedRounds(comm, errors, writer, exchange))


def gathered_model(codec: Codec, n: int, piece_bytes: int) -> MessageModel:
    """See `Algorithm.message_model`: the same bytes whatever a message's weight."""
    return MessageModel(codec.nbytes, piece_elements(codec, n, piece_bytes), codec.alignment, Route())


class AllGather:
    """Codes round the ring; see `CodedRounds`."""

    def __init__(self, comm: Communicator, program: Program, payload: AllGatherPayload) -> None:
        self._comm, self._program, self.payload, self._tag = comm, program, payload, comm.fixed_tag()
        self._requests = comm.persistent(self) if payload.fixed else None

    def steps(self, call: VectorCall, encoded: Callable[[], None]) -> Iterator[bool]:
        """See `CodedRounds`."""
        self.payload.begin(call.values)
        made = self._program, self.payload, self._tag, call.traffic, encoded, self._requests
        return self._comm.execute(call, *made)

    def end(self) -> None:
        """See `CodedRounds`."""
        self.payload.values = self.payload.nothing


class AllGatherPayload:
    """Every rank's payloads of a vector; see `collectives.execution.payload.Payload`.

    Parameters
    ----------
    program : Program
        By `gather_program`.
    encoder : FeedbackEncoder
    writer : ResultWriter
    """

    receive_buffers = 0
    fixed: bool  # whether messages have the same lengths at every step

    def __init__(self, program: Program, encoder: FeedbackEncoder, writer: ResultWriter) -> None:
        size = program.plan.size
        self._cuts = program.pieces[: len(program.pieces) // size]
        n = self._cuts[-1].stop if self._cuts else 0
        self.brief = n <= BRIEF_ELEMENTS
        self._encoder, self._writer, self._size = encoder, writer, size
        self._payloads = buffers([encoder.codec.nbytes(len(cut)) for cut in program.pieces])
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in self._payloads]
        self.fixed = not varies(encoder.codec)
        self._missing = [size] * len(self._cuts)
        self._mean = np.empty(program.longest_piece, encoder.dtype)
        self._decoded = np.empty_like(self._mean)
        self.nothing = self.values = np.empty(0, encoder.dtype)

    def begin(self, values: NDArray[Any]) -> None:
        """Go to another vector."""
        self.values = values
        self._missing = [self._size] * len(self._cuts)

    def encode(self, piece: int) -> None:
        """See `Payload`."""
        cut = self._cuts[piece % len(self._cuts)]
        self._encoder.encode(self.values[cut.start : cut.stop], cut, self._payloads[piece])

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        if self.fixed:
            return self._messages[piece]
        payload = self._payloads[piece]
        return [payload, sent_bytes(self._encoder.codec, payload, len(self._cuts[piece % len(self._cuts)])), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def finish(self, piece: int) -> None:
        """See `Payload`: once the last rank's is there, decode all in rank order."""
        count = len(self._cuts)
        k = piece % count
        self._missing[k] -= 1
        if self._missing[k]:
            return
        codec, payloads, decoded = self._encoder.codec, self._payloads[k::count], self._decoded[: len(self._cuts[k])]
        self._writer.write(self._cuts[k], lambda out: take_mean(codec, payloads, out, decoded), self._mean)
