"""Counts of positive signs: how methods that add up votes get them round, and what their aggregators share.

The count of +1 travels along a topology's plan in bit planes. A partial count of m ranks takes ceil(log2(m + 1)) bits
per element, so messages grow on their way to the rank that completes a piece. Adding is exact: the result is the same
over every topology, and whoever adds what to what.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.execution.payload import Cache
from collectives.execution.program import Message, Program
from collectives.memory import PAGE, aligned_empty
from mpicomp.aggregator.base import Algorithm, MessageModel, VectorAggregator
from mpicomp.codecs.vote_counts import Counts, planes_of
from mpicomp.kernels.cpu.vote_counts import add_counts
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS, MEMORY_MATTERS, MEMORY_PART, MOST_SLOTS, Encode

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches

Words = NDArray[np.uint64]
Decide = Callable[[int, Words, int], None]


def counts_wire(n: int, ranks: int, piece_bytes: int, nbytes: Callable[[int, int], int]) -> MessageModel:
    """See `Algorithm.message_model`; the longest message of a piece is that of its complete counts."""
    piece = max(1, 8 * piece_bytes // planes_of(ranks))
    if n >= MEMORY_MATTERS:
        piece = min(piece, n // 5)
    return MessageModel(nbytes, piece, Counts().alignment)


class VoteCountPayload:
    """Counts of one vector; see `collectives.execution.payload.Payload`.

    Memory: the bits of a complete count per element, and per slot those of what comes in.

    Parameters
    ----------
    program : Program
    encode, finish : callable
        Turn this rank's piece into signs, the first plane of its counts; turn the final counts into the result.
    decide : callable, optional
        ``decide(piece, counts, words)`` makes complete counts into one bit each, in the first plane; these travel in
        the gather phase.
    """

    def __init__(self, program: Program, encode: Encode, finish: Encode, decide: Decide | None = None) -> None:
        self.encode, self.finish, self._decide = encode, finish, decide
        self._size = size = program.plan.size
        self._pieces = program.pieces
        n = self._pieces[-1].stop if self._pieces else 0
        self.brief = n <= BRIEF_ELEMENTS
        longest = program.longest_piece
        merging = any(message.held_weight for message in program.recvs)
        self.slots = max(1, min(MOST_SLOTS, int(MEMORY_PART * n / longest))) if merging else 0
        self.words = [-(-len(cut) // 64) for cut in self._pieces]
        self.counts = _rows([self._room(words, size) for words in self.words])
        row = self._room(-(-longest // 64), size)
        self._incoming = _rows([row] * self.slots)

    @staticmethod
    def _room(words: int, weight: int) -> int:
        """Words of a piece's counts."""
        return planes_of(weight) * words

    def begin(self, step: int, traffic: Traffic) -> None:
        """Go to another step, whose cost is counted into `traffic`."""

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: the counts themselves, or the bits they became."""
        planes = 1 if weight == self._size and self._decide is not None else planes_of(weight)
        return _message(self.counts[piece], planes * self.words[piece])

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self.outgoing(piece, weight)

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        """See `Payload`."""
        return _message(self._incoming[slot], planes_of(weight) * self.words[piece])

    def prepare(self, message: Message, slot: int) -> None:
        """See `Payload`: adding needs nothing but the counts."""

    def merge(self, message: Message, slot: int) -> None:
        """Add what landed."""
        self._add(message, self._incoming[slot])

    def _add(self, message: Message, incoming: Words) -> None:
        piece, weight = message.piece, message.weight + message.held_weight
        held, words = self.counts[piece], self.words[piece]
        add_counts(incoming, planes_of(message.weight), held, planes_of(message.held_weight), planes_of(weight), words)
        if weight == self._size and self._decide is not None:
            self._decide(self._pieces[piece].start, held, words)


def _rows(sizes: Sequence[int]) -> list[Words]:
    """One array of each size, in words; each begins at a page."""
    page = PAGE // 8
    starts = np.cumsum([0, *(-(-size // page) * page for size in sizes)]).tolist()
    whole = aligned_empty(starts[-1], np.uint64)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _message(words: Words, count: int) -> Any:
    return [words[:count], 8 * count, MPI.BYTE]


class VoteCountAggregator(VectorAggregator):
    """Base of methods by counts: a method fills in `_encode` and `_finish`, piece by piece.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id, tensor_lengths
        As in `Algorithm.start`.
    payload : callable
        Makes the payload, given the program, `_encode` and `_finish`.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
        payload: Callable[[Program, Encode, Encode], VoteCountPayload] = VoteCountPayload,
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id, tensor_lengths)
        shape = algorithm.message_model(n, self.dtype, comm.size, comm.packed_piece_bytes())
        topology = comm.select(shape.nbytes(n, comm.size))
        self._program = comm.program(topology, n, shape.alignment, shape.piece_elements)
        self._payload = payload(self._program, self._encode, self._finish)
        self._requests: Cache | None = comm.persistent(self)
        self._traffic = Traffic()
        self._values: NDArray[Any] = np.empty(0)
        self._out: NDArray[Any] = np.empty(0)

    @abstractmethod
    def _encode(self, piece: int) -> None:
        """Write the signs of this rank's piece into the first plane of its counts."""

    @abstractmethod
    def _finish(self, piece: int) -> None:
        """Write the result of a piece."""

    @abstractmethod
    def _count(self) -> None:
        """Take this step: raise before anything is changed that the next step needs, or change it."""

    def _reduce(self, values: NDArray[Any], out: NDArray[Any], traffic: Traffic) -> None:
        if not self.n:
            return
        self._values, self._out, self._traffic = values, out, traffic
        # 16-bit results are made in float32 where the widened vector was: a piece's signs are out by then
        self._target = out if self._wide is None else self._wide
        self._streaming = self._wide is None and self.n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0
        try:
            self._count()
        finally:
            self._values = self._out = self._target = np.empty(0)  # the caller's are his to free

    def _travel(self, encoded: Callable[[], None] | None = None) -> None:
        """Encode, add up and finish all pieces."""
        self._payload.begin(self.step, self._traffic)
        self.comm.execute(self._program, self._payload, self._tag, self._traffic, encoded, self._requests)
