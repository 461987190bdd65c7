"""Two-pass compression: ranks send codes to the owner of each shard, which sends a code of their mean to all.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send R(v);     d <- v - R(v)
    result:   R(v)

A shard's owner sums what the ranks sent in rank order, whatever the order of arrival, so a parameter server, which owns
everything, and owners of a part each get the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.program import Message, Program
from collectives.schedules.direct import Direct
from collectives.schedules.plan import Topology
from collectives.schedules.star import Star
from collectives.testable import Testable
from mpicomp.aggregator.parts import Parts, VectorSpec
from mpicomp.aggregator.state import OWNED, check_owned
from mpicomp.codecs.base import Codec, sent_bytes
from mpicomp.feedback.error_feedback import ErrorRule, FeedbackEncoder, take_mean
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedPayload, CodedRounds, Residuals, after, buffers, piece_elements
from mpicomp.reducers.coded_device import Place, place_of

MOST_BUFFERS = 8


def route(comm: Communicator) -> Topology:
    """By which way: over the root of a star if that was chosen, else directly between ranks and owners."""
    topology = comm.topology
    return topology if isinstance(topology, Star) else Direct()


def two_pass(
    comm: Communicator,
    spec: VectorSpec,
    codec: Codec,
    second: Codec,
    feedback: ErrorRule | None,
    owners_feedback: ErrorRule | None,
    seed: int = 0,
) -> Parts:
    """Feedback x codec x two passes.

    codec, feedback : worker to owner. second, owners_feedback : owner to worker.
    """
    longest = piece_elements(codec, spec.n, comm.packed_piece_bytes(), second)
    program = comm.program(route(comm), spec.n, codec.alignment, longest)
    here = spec.n, spec.compute, program.longest_piece
    of_worker, of_owner = (Stream(seed, spec.vector_id, f"code of {who}") for who in ("worker", "owner"))
    place = place_of(spec)
    worker = place.encoder(codec, feedback, *here, of_worker, comm.rank)
    # what an owner sends is the result itself: its error is what all ranks miss, rounding to 16 bits included
    applied = spec.dtype if spec.sixteen_bit else None
    owner = FeedbackEncoder(second, owners_feedback, *here, of_owner, 0, applied)
    payload = TwoPassPayload(spec, program, place, codec, worker, owner)
    own = payload.own if owners_feedback is not None else None
    errors = OwnerResiduals(worker, owner, own)
    return Parts(errors, codec, CodedRounds(comm, errors, program, payload, tell_at_once=False))


class OwnerResiduals(Residuals):
    """The worker's error and, of the elements that this rank owns, the owner's; see `Residuals`.

    own : the elements that this rank owns; None: owners keep no error.
    """

    def __init__(self, worker: FeedbackEncoder, owner: FeedbackEncoder, own: range | None) -> None:
        super().__init__(
            {"worker_error": worker, "owner_error": owner},
            {"worker_error": "mean", "owner_error": "owner", OWNED: "owned"},
        )
        self.owner, self._own = owner, own

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the errors, and the range of elements whose owner's error the state has."""
        state = super().state()
        return state if self._own is None else state | {OWNED: np.array([self._own.start, self._own.stop])}

    def check_owner(self, state: dict[str, Any], where: str) -> None:
        """Raise ValueError if a state has errors of elements that are another rank's."""
        if self._own is not None:
            check_owned(state, "owner_error", self._own, where)

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`; of the owners' errors this rank takes those of the elements that it owns."""
        told = super().load(state)
        if self._own is not None:
            self.owner.residual[: self._own.start] = 0
            self.owner.residual[self._own.stop :] = 0
        return told


class TwoPassPayload(CodedPayload):
    """One vector's codes on their way to owners and back, by a plan in which one rank merges what all others send it.

    place : where this rank's half of a step is done; as an owner it works on the host. codec : of the first pass.
    worker, owner : this rank's own half of a step, and its half as an owner. See `MergedPayload`.
    """

    def __init__(
        self,
        spec: VectorSpec,
        program: Program,
        place: Place,
        codec: Codec,
        worker: FeedbackEncoder,
        owner: FeedbackEncoder,
    ) -> None:
        super().__init__(spec, program.pieces, place.results(spec, program.longest_piece))
        self._size = program.plan.size
        self._codec, self._worker, self._owner = codec, worker, owner
        merging = [any(m.held_weight for m in chain) for chain in program.chains]
        owned = [piece for piece, merges in enumerate(merging) if merges or self._size == 1]
        # the elements that this rank owns, which follow each other
        self.own = range(self._cuts[owned[0]].start, self._cuts[owned[-1]].stop) if owned else range(0)
        self.receive_buffers = min(MOST_BUFFERS, self._size - 1) if any(merging) else 0
        lengths = [len(cut) for cut in self._cuts]
        self._mine, self._means = place.payloads(codec, lengths), place.payloads(owner.codec, lengths)
        self._buffers = buffers([codec.nbytes(program.longest_piece)] * self.receive_buffers)
        # what ranks sent of a piece that this rank owns
        ranks, rank, mine = range(program.plan.size), program.plan.rank, self._mine.host
        self._sent = {
            piece: [mine[piece] if one == rank else np.empty_like(mine[piece]) for one in ranks] for piece in owned
        }

    def encode(self, piece: int) -> Testable | None:
        """See `Payload`."""
        cut = self._cuts[piece]
        self._worker.encode(self._part(cut), cut, self._mine.there[piece])
        encoded = self._mine.fetch(piece)
        return after(encoded, partial(self._complete, piece)) if self._size == 1 else encoded

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: this rank's own code, or the result's."""
        codec, payload = self._codec, self._mine.host[piece]
        if weight > 1:
            codec, payload = self._owner.codec, self._means.host[piece]
        return [payload, sent_bytes(codec, payload, len(self._cuts[piece])), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        payload = self._means.host[piece]
        return [payload, payload.nbytes, MPI.BYTE]

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        nbytes = self._mine.host[piece].size
        return [self._buffers[buffer][:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """See `Payload`: there is nothing to draw."""

    def merge(self, message: Message, buffer: int) -> None:
        """See `Payload`: put it aside until all are there."""
        piece = message.piece
        incoming = self._sent[piece][message.peer]
        incoming[:] = self._buffers[buffer][: incoming.size]
        if self._complete_by(piece, self._size - 1):
            self._complete(piece)

    def _complete(self, piece: int) -> None:
        """The owner's half: the mean in rank order, its code, and what that leaves out."""
        cut, scratch = self._cuts[piece], self._results.scratch
        mean = scratch.mean[: len(cut)]
        take_mean(self._codec, self._sent[piece], mean, scratch.decoded[: len(cut)])
        self._owner.encode(mean, cut, self._means.host[piece])

    def finish(self, piece: int) -> Testable | None:
        """See `Payload`."""
        cut, codec, payload = self._cuts[piece], self._means.codec, self._means.there[piece]
        decode = partial(codec.decode, payload, weight=self._size)
        if hasattr(codec, "decode_drawn"):
            decode = partial(codec.decode_drawn, payload, draw=self._owner.draw(cut))
        self._means.deliver(piece)
        return self._results.write(cut, lambda out, _: decode(out))
