"""Two-pass compression: ranks send codes to the owner of each shard, which sends a code of their mean to all.

    rank m:   v_m = g_m + d_m;         send Q(v_m);   d_m <- v_m - Q(v_m)
    owner:    v = d + mean_m Q(v_m);   send R(v);     d <- v - R(v)
    result:   R(v)

A shard's owner sums what the ranks sent in rank order, whatever the order of arrival, so a parameter server, which owns
everything, and owners of a part each get the same bits.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.execution.program import Message, Program
from collectives.schedules.direct import Direct
from collectives.schedules.plan import Topology
from collectives.schedules.star import Star
from mpicomp.aggregator.base import Algorithm, StateKind, VectorAggregator
from mpicomp.aggregator.state import OWNED, check_owned
from mpicomp.codecs.base import Bytes, Codec, sent_bytes
from mpicomp.codecs.error_feedback import Feedback
from mpicomp.kernels.streams import Stream
from mpicomp.reducers.coded import CodedAggregator, FeedbackEncoder, buffers, piece_elements, take_mean

MOST_SLOTS = 8
BRIEF_ELEMENTS = 1 << 14


def route(comm: Communicator) -> Topology:
    """By which way: over the root of a star if that was chosen, else directly between ranks and owners."""
    topology = comm.topology
    return topology if isinstance(topology, Star) else Direct()


class TwoPassPayload:
    """One vector's codes on their way to owners and back; see `collectives.execution.payload.Payload`.

    Parameters
    ----------
    program : Program
        Of a plan in which one rank merges what all others send it.
    worker, owner : FeedbackEncoder
        The rank's own half of a step, and what it does as an owner.
    put : callable
        ``put(cut, decode, spare)`` lets ``decode(array)`` write the result of a piece; `spare` is long enough for it.
    """

    def __init__(self, program: Program, worker: FeedbackEncoder, owner: FeedbackEncoder, put: Any) -> None:
        self._cuts, self._rank, self._size = program.pieces, program.plan.rank, program.plan.size
        n = self._cuts[-1].stop if self._cuts else 0
        self.brief = n <= BRIEF_ELEMENTS
        self._worker, self._owner, self._put = worker, owner, put
        merging = [any(m.held_weight for m in chain) for chain in program.chains]
        self.owned = [merges or self._size == 1 for merges in merging]
        self.slots = min(MOST_SLOTS, self._size - 1) if any(merging) else 0
        self._mine = buffers([worker.codec.nbytes(len(cut)) for cut in self._cuts])
        self._results = buffers([owner.codec.nbytes(len(cut)) for cut in self._cuts])
        longest = program.longest_piece
        self._slots = buffers([worker.codec.nbytes(longest)] * self.slots)
        # what others sent of a piece that this rank owns
        self._sent = {
            piece: {rank: np.empty_like(self._mine[piece]) for rank in range(self._size) if rank != self._rank}
            for piece, owned in enumerate(self.owned)
            if owned
        }
        self._arrived = [0] * len(self._cuts)
        self._mean = np.empty(longest, worker.dtype)
        self._decoded = np.empty_like(self._mean)
        self.values: NDArray[Any] = self._mean

    def begin(self, values: NDArray[Any], step: int) -> None:
        """Go to another vector and step."""
        self.values = values
        self._worker.begin(step)
        self._owner.begin(step)
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

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        """See `Payload`."""
        return self._message(self._slots[slot][: self._mine[piece].size])

    def prepare(self, message: Message, slot: int) -> None:
        """See `Payload`: there is nothing to draw."""

    def merge(self, message: Message, slot: int) -> None:
        """See `Payload`: put it aside until all are there."""
        piece = message.piece
        landed = self._sent[piece][message.peer]
        landed[:] = self._slots[slot][: landed.size]
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
        self._put(self._cuts[piece], lambda out: decode(payload, out, weight=self._size), self._decoded)

    @staticmethod
    def _message(payload: Bytes) -> Any:
        return [payload, payload.nbytes, MPI.BYTE]


class TwoPassAggregator(CodedAggregator):
    """Keeps the step counter, the worker's error and, of the shards it owns, the owner's.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id
        As in `Algorithm.start`.
    codec, second : Codec
        Of what ranks send to owners, and owners to ranks.
    feedback, owners_feedback : Feedback, optional
        Of each.
    seed : int
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {
        **VectorAggregator.state_kinds,
        "worker_error": "mean",
        "owner_error": "owner",
        OWNED: "owned",
    }

    def __init__(
        self,
        algorithm: Algorithm,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        codec: Codec,
        second: Codec,
        feedback: Feedback | None,
        owners_feedback: Feedback | None,
        seed: int = 0,
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id)
        longest = piece_elements(codec, n, comm.packed_piece_bytes(), second)
        self._program = comm.program(route(comm), n, codec.alignment, longest)
        longest = self._program.longest_piece
        here = n, self._compute, longest
        of_worker, of_owner = (Stream(seed, vector_id, f"code of {who}") for who in ("worker", "owner"))
        self.worker = FeedbackEncoder(codec, feedback, *here, of_worker, comm.rank)
        # what an owner sends is the result itself: its error is what all ranks miss, rounding to 16 bits included
        applied = None if self._wide is None else self.dtype
        self.owner = FeedbackEncoder(second, owners_feedback, *here, of_owner, 0, applied)
        self._keeps_owner_error = owners_feedback is not None
        self._payload = TwoPassPayload(self._program, self.worker, self.owner, self._put)

    def _exchange(self, values: NDArray[Any], traffic: Traffic) -> None:
        self._payload.begin(values, self.step)
        self.comm.execute(self._program, self._payload, self._tag, traffic)
        self._payload.values = np.empty(0)  # the caller's is his to free
        self._tell()  # only now: owners encode what others have sent

    def _workers(self) -> tuple[FeedbackEncoder, ...]:
        return self.worker, self.owner

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"worker_error": self.worker.residual, "owner_error": self.owner.residual}

    @property
    def _own(self) -> range:
        """The elements that this rank owns, which follow each other."""
        own = [cut for cut, owned in zip(self._program.pieces, self._payload.owned, strict=True) if owned]
        return range(own[0].start, own[-1].stop) if own else range(0)

    def state_dict(self) -> dict[str, Any]:
        """See `VectorAggregator`; with the range of elements whose owner's error the state has."""
        state = super().state_dict()
        return state | {OWNED: np.array([self._own.start, self._own.stop])} if self._keeps_owner_error else state

    def _taken(self, state: dict[str, Any]) -> dict[str, Any]:
        taken = super()._taken(state)
        if self._keeps_owner_error:
            where = f"rank {self.comm.rank} of {self.comm.size}, vector {self.vector_id}"
            check_owned(state, "owner_error", self._own, where)
        return taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `VectorAggregator`; of the owners' errors this rank takes those of the elements that it owns."""
        super().load_state_dict(state)
        if self._keeps_owner_error:
            self.owner.residual[: self._own.start] = 0
            self.owner.residual[self._own.stop :] = 0
