"""Two-pass compression: ranks send codes to the owner of each shard, which sends a code of their mean to all.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send R(v);     d <- v - R(v)
    result:   R(v)

A shard's owner sums what the ranks sent in rank order, whatever the order of arrival, so a parameter server, which owns
everything, and owners of a part each get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator
from collectives.execution.program import Message, Program
from collectives.schedules.direct import Direct
from collectives.schedules.plan import Topology
from collectives.schedules.star import Star
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Parts, VectorSpec
from mpicomp.aggregator.state import OWNED, check_owned
from mpicomp.codecs.base import Bytes, Codec, sent_bytes
from mpicomp.codecs.error_feedback import ErrorRule, FeedbackEncoder, take_mean
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedRounds, Residuals, ResultWriter, buffers, piece_elements

MOST_BUFFERS = 8
BRIEF_ELEMENTS = 1 << 14


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
    worker = FeedbackEncoder(codec, feedback, *here, of_worker, comm.rank)
    # what an owner sends is the result itself: its error is what all ranks miss, rounding to 16 bits included
    applied = spec.dtype if spec.sixteen_bit else None
    owner = FeedbackEncoder(second, owners_feedback, *here, of_owner, 0, applied)
    writer = ResultWriter(spec.dtype, spec.sixteen_bit)
    payload = TwoPassPayload(program, worker, owner, writer)
    own = payload.own if owners_feedback is not None else None
    errors = OwnerResiduals(worker, owner, own)
    return Parts(errors, codec, CodedRounds(comm, errors, writer, TwoPass(comm, program, payload)))


class OwnerResiduals(Residuals):
    """The worker's error and, of the elements that this rank owns, the owner's; see `Residuals`.

    Parameters
    ----------
    worker, owner : FeedbackEncoder
    own : range or None
        Elements that this rank owns; None: owners keep no error.
    """

    def __init__(self, worker: FeedbackEncoder, owner: FeedbackEncoder, own: range | None) -> None:
        super().__init__(
            {"worker_error": worker, "owner_error": owner},
            {"worker_error": "mean", "owner_error": "owner", OWNED: "owned"},
        )
        self.worker, self.owner, self._own = worker, owner, own

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


class TwoPass:
    """Codes to owners and back; see `CodedRounds`.

    Parameters
    ----------
    comm, program, payload
    tell_at_once : bool
        Only workers' encoding may fail, so the ranks can tell each other of it before owners have encoded.
    """

    def __init__(
        self, comm: Communicator, program: Program, payload: TwoPassPayload, tell_at_once: bool = False
    ) -> None:
        self._comm, self._program, self.payload, self._tag = comm, program, payload, comm.fixed_tag()
        self._tell_at_once = tell_at_once

    def steps(self, call: VectorCall, encoded: Callable[[], None]) -> Iterator[bool]:
        """See `CodedRounds`."""
        self.payload.begin(call.values)
        at_once = encoded if self._tell_at_once else None
        yield from self._comm.execute(call, self._program, self.payload, self._tag, call.traffic, at_once)
        if at_once is None:
            encoded()  # only now: owners encode what others have sent

    def end(self) -> None:
        """See `CodedRounds`."""
        self.payload.values = self.payload.nothing


class TwoPassPayload:
    """One vector's codes on their way to owners and back; see `collectives.execution.payload.Payload`.

    Parameters
    ----------
    program : Program
        Of a plan in which one rank merges what all others send it.
    worker, owner : FeedbackEncoder
        The rank's own half of a step, and its half as an owner.
    writer : ResultWriter
    """

    def __init__(self, program: Program, worker: FeedbackEncoder, owner: FeedbackEncoder, writer: ResultWriter) -> None:
        self._cuts, self._rank, self._size = program.pieces, program.plan.rank, program.plan.size
        n = self._cuts[-1].stop if self._cuts else 0
        self.brief = n <= BRIEF_ELEMENTS
        self._worker, self._owner, self._writer = worker, owner, writer
        merging = [any(m.held_weight for m in chain) for chain in program.chains]
        self.owned = [merges or self._size == 1 for merges in merging]
        self.receive_buffers = min(MOST_BUFFERS, self._size - 1) if any(merging) else 0
        self._mine = buffers([worker.codec.nbytes(len(cut)) for cut in self._cuts])
        self._results = buffers([owner.codec.nbytes(len(cut)) for cut in self._cuts])
        longest = program.longest_piece
        self._buffers = buffers([worker.codec.nbytes(longest)] * self.receive_buffers)
        # what others sent of a piece that this rank owns
        self._sent = {
            piece: {rank: np.empty_like(self._mine[piece]) for rank in range(self._size) if rank != self._rank}
            for piece, owned in enumerate(self.owned)
            if owned
        }
        self._arrived = [0] * len(self._cuts)
        self._mean = np.empty(longest, worker.dtype)
        self._decoded = np.empty_like(self._mean)
        self.nothing = self.values = np.empty(0, worker.dtype)

    @property
    def own(self) -> range:
        """The elements that this rank owns, which follow each other."""
        own = [cut for cut, owned in zip(self._cuts, self.owned, strict=True) if owned]
        return range(own[0].start, own[-1].stop) if own else range(0)

    def begin(self, values: NDArray[Any]) -> None:
        """Go to another vector."""
        self.values = values
        self._arrived = [0] * len(self._cuts)

    def encode(self, piece: int) -> None:
        """See `Payload`."""
        cut = self._cuts[piece]
        self._worker.encode(self.values[cut.start : cut.stop], cut, self._mine[piece])
        if self._size == 1:
            self._complete(piece)

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: this rank's own code, or the result's."""
        codec, payload = self._worker.codec, self._mine[piece]
        if weight > 1:
            codec, payload = self._owner.codec, self._results[piece]
        return [payload, sent_bytes(codec, payload, len(self._cuts[piece])), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._message(self._results[piece])

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        return self._message(self._buffers[buffer][: self._mine[piece].size])

    def prepare(self, message: Message, buffer: int) -> None:
        """See `Payload`: there is nothing to draw."""

    def merge(self, message: Message, buffer: int) -> None:
        """See `Payload`: put it aside until all are there."""
        piece = message.piece
        incoming = self._sent[piece][message.peer]
        incoming[:] = self._buffers[buffer][: incoming.size]
        self._arrived[piece] += 1
        if self._arrived[piece] == self._size - 1:
            self._complete(piece)

    def _complete(self, piece: int) -> None:
        """The owner's half: the mean in rank order, its code, and what that leaves out."""
        cut = self._cuts[piece]
        mean, decoded = self._mean[: len(cut)], self._decoded[: len(cut)]
        sent = {**self._sent[piece], self._rank: self._mine[piece]}
        take_mean(self._worker.codec, [sent[rank] for rank in range(self._size)], mean, decoded)
        self._owner.encode(mean, cut, self._results[piece])

    def finish(self, piece: int) -> None:
        """See `Payload`."""
        decode, payload = self._owner.codec.decode, self._results[piece]
        self._writer.write(self._cuts[piece], lambda out: decode(payload, out, weight=self._size), self._decoded)

    @staticmethod
    def _message(payload: Bytes) -> Any:
        return [payload, payload.nbytes, MPI.BYTE]
