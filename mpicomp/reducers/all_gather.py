"""Codes that can only be gathered: every rank's go to every rank, which adds them up in rank order.

Sums of codes are no codes, so every rank gets every rank's. They flow piece by piece, once round the ring, while later
pieces are encoded and earlier ones summed. Where the topology is a star, a server gets the codes instead, adds them up
and sends the mean back in full precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from collectives import Communicator
from collectives.execution.partition import pieces
from collectives.execution.program import Program, gather_program
from collectives.schedules.all_gather import AllGather as Route
from collectives.schedules.star import Star
from collectives.testable import Testable
from mpicomp.aggregator.parts import MessageModel, Parts, VectorSpec
from mpicomp.codecs.base import Codec, sent_bytes, varies
from mpicomp.codecs.full_precision import FullPrecision
from mpicomp.feedback.error_feedback import ErrorRule, FeedbackEncoder, take_mean
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedPayload, CodedRounds, Residuals, piece_elements
from mpicomp.reducers.coded_device import Place, place_of
from mpicomp.reducers.two_pass import TwoPassPayload, route


def all_gather(comm: Communicator, spec: VectorSpec, codec: Codec, feedback: ErrorRule | None, seed: int = 0) -> Parts:
    """Feedback x codec x all-gather, or over a star x two passes, the second in full precision."""
    star, back = isinstance(comm.topology, Star), FullPrecision(spec.dtype)
    longest = piece_elements(codec, spec.n, comm.packed_piece_bytes(), back if star else None)
    if star:
        program = comm.program(route(comm), spec.n, codec.alignment, longest)
    else:
        program = gather_program(comm.rank, comm.size, pieces(range(spec.n), longest, codec.alignment))
    stream, here = Stream(seed, spec.vector_id, "code"), (spec.n, spec.compute, program.longest_piece)
    place = place_of(spec)
    encoder = place.encoder(codec, feedback, *here, stream, comm.rank)
    errors = Residuals({"residual": encoder}, {"residual": "mean"})
    payload: TwoPassPayload | AllGatherPayload
    if star:
        server = FeedbackEncoder(back, None, *here, stream, 0)
        payload = TwoPassPayload(spec, program, place, codec, encoder, server)
    else:
        payload = AllGatherPayload(spec, program, place, codec, encoder)
    persistent = not star and not varies(codec)
    return Parts(errors, codec, CodedRounds(comm, errors, program, payload, True, persistent))


def gathered_model(codec: Codec, n: int, piece_bytes: int) -> MessageModel:
    """See `Algorithm.message_model`: the same bytes whatever a message's weight."""
    return MessageModel(codec.nbytes, piece_elements(codec, n, piece_bytes), codec.alignment, Route())


class AllGatherPayload(CodedPayload):
    """Every rank's payloads of a vector, for a program by `gather_program`; see `Payload`.

    place : where this rank's half of a step is done. encoder : that half's, of `codec`.
    """

    receive_buffers = 0

    def __init__(
        self, spec: VectorSpec, program: Program, place: Place, codec: Codec, encoder: FeedbackEncoder
    ) -> None:
        size = program.plan.size
        cuts = program.pieces[: len(program.pieces) // size]
        super().__init__(spec, cuts, place.results(spec, program.longest_piece))
        self._encoder, self._codec, self._size, self._rank = encoder, codec, size, program.plan.rank
        self._payloads = place.payloads(codec, [len(cut) for cut in program.pieces])
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in self._payloads.host]
        self._fixed = not varies(codec)

    def encode(self, piece: int) -> Testable | None:
        """See `Payload`."""
        cut = self._cuts[piece % len(self._cuts)]
        self._encoder.encode(self._part(cut), cut, self._payloads.there[piece])
        return self._payloads.fetch(piece)

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        if self._fixed:
            return self._messages[piece]
        payload = self._payloads.host[piece]
        return [payload, sent_bytes(self._codec, payload, len(self._cuts[piece % len(self._cuts)])), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def finish(self, piece: int) -> Testable | None:
        """See `Payload`: once the last rank's is there, decode all in rank order."""
        rank, k = divmod(piece, len(self._cuts))
        if rank != self._rank:
            self._payloads.deliver(piece)
        if not self._complete_by(k, self._size):
            return None
        codec, payloads = self._payloads.codec, self._payloads.there[k :: len(self._cuts)]
        return self._results.write(self._cuts[k], partial(take_mean, codec, payloads))
