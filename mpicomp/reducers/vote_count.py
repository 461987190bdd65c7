"""Counts of positive signs, which are added on the way.

The count of +1 travels along a topology's plan in bit planes. A partial count of m ranks takes ceil(log2(m + 1)) bits
per element, so messages grow on their way to the rank that completes a piece. Addition is exact, so the result depends
neither on the topology nor on the order of additions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
from mpi4py import MPI

from collectives import Communicator, Traffic
from collectives.annotations import AnyArray, Testable, Words, override
from collectives.arrays.elements import PAGE, aligned_empty
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from mpicomp import kernels
from mpicomp.aggregator.algorithm import Algorithm, MessageModel, VectorSpec
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Round
from mpicomp.codecs.elias_counts import Elias, message_bytes, scratch
from mpicomp.codecs.vote_counts import Counts, planes_of
from mpicomp.feedback.payloads import buffers
from mpicomp.feedback.rounds import Work
from mpicomp.feedback.votes import VoteLayout
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS, MEMORY_MATTERS, buffer_count

_ELIAS = Elias()


def counts_model(n: int, ranks: int, piece_bytes: int, nbytes: Callable[[int, int], int]) -> MessageModel:
    """Return the message model of counts; the longest message of a piece has its complete counts."""
    piece = max(1, 8 * piece_bytes // planes_of(ranks))
    if n >= MEMORY_MATTERS:
        piece = min(piece, n // 5)
    return MessageModel(nbytes, piece, Counts().alignment)


class VoteCount(Reducer):
    """Reducer that adds counts along the plan of the communicator's topology.

    Parameters
    ----------
    options : Algorithm
        Options of the method, which has the message model.
    payload : callable, optional
        Creates a payload with messages of varying length from a program. None: a `VoteCountPayload`, with messages of
        fixed length.

    Attributes
    ----------
    layout : VoteLayout
        Place of the votes, for the feedback that casts them.
    """

    def __init__(
        self,
        options: Algorithm,
        comm: Communicator,
        spec: VectorSpec,
        payload: Callable[[Program], VoteCountPayload] | None = None,
    ) -> None:
        self._tag = comm.fixed_tag()
        model = options.message_model(spec.n, spec.dtype, comm.size, comm.routes.packed_piece_bytes())
        topology = comm.select(model.nbytes(spec.n, comm.size))
        self.program = comm.routes.program(topology, spec.n, model.alignment, model.piece_elements)
        self.payload = (payload or VoteCountPayload)(self.program)
        self.brief = self.payload.brief
        self.layout = VoteLayout(self.program.pieces, self.payload.counts, spec.dtype, comm.size)
        self._requests = comm.users.persistent(self) if payload is None else None

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        payload = self.payload
        payload.begin(call.traffic, work)
        try:
            yield from execute(call, self.program, payload, self._tag, call.traffic, encoded, self._requests)
        finally:
            payload.end()


class VoteCountPayload:
    """Counts of one vector: a `collectives.execution.payload.MergedPayload`.

    Memory: the bits of a complete count for each element, and those of a message for each receive buffer.

    Attributes
    ----------
    counts : list of uint64 arrays
        Counts by pieces: at first this rank's signs, in the first plane, and finally the complete counts.
    words : list of int
        Number of words of a plane, by pieces.

    A round with `complete` replaces complete counts by one bit each in the first plane, which travel back.
    """

    encode: Work
    finish: Work

    def __init__(self, program: Program) -> None:
        self._complete: Callable[[int], None] | None = None
        self._size = size = program.plan.size
        self._pieces = program.pieces
        n = self._pieces[-1].stop if self._pieces else 0
        self.brief = n <= BRIEF_ELEMENTS
        self.receive_buffers = buffer_count(program, n)
        self.words = [-(-len(cut) // 64) for cut in self._pieces]
        row = planes_of(size) * -(-program.longest_piece // 64)
        rows = buffers([8 * planes_of(size) * words for words in self.words], PAGE)
        self.counts: list[Words] = [one.view(np.uint64) for one in rows]
        incoming = buffers([8 * row] * self.receive_buffers, PAGE)
        self._incoming: list[AnyArray] = [one.view(np.uint64) for one in incoming]
        self._add_counts = kernels.of("cpu").vote_counts.add_counts

    def begin(self, traffic: Traffic, work: Round) -> None:
        """Start another step; `traffic` counts the time in which subclasses encode messages."""
        self.encode, self.finish, self._complete = work.encode, work.decode, work.complete

    def end(self) -> None:
        """Drop the references to the feedback, which would keep it alive in a cycle."""
        del self.encode, self.finish
        self._complete = None

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the counts to send, or the decided bits."""
        planes = 1 if weight == self._size and self._complete is not None else planes_of(weight)
        return _message(self.counts[piece], planes * self.words[piece])

    replacing = outgoing

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for counts that will be added."""
        return _message(self._incoming[buffer], planes_of(weight) * self.words[piece])

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing: an addition needs no random words."""

    def merge(self, message: Message, buffer: int) -> None:
        """Add the counts of a message."""
        self._add(message, self._incoming[buffer])

    def _add(self, message: Message, incoming: Words) -> None:
        piece, weight = message.piece, message.weight + message.held_weight
        held, words = self.counts[piece], self.words[piece]
        planes = planes_of(message.weight), planes_of(message.held_weight), planes_of(weight)
        self._add_counts(incoming, planes[0], held, planes[1], planes[2], words)
        if weight == self._size and self._complete is not None:
            self._complete(piece)


class _Scratch(threading.local):
    """Memory of a thread for the counts of a message, and for their decoding."""

    def __init__(self, longest: int, longest_message: int) -> None:
        self.decoded, self.work = np.empty(longest_message // 8, np.uint64), scratch(longest)


class EliasPayload(VoteCountPayload):
    """Counts in messages of varying length: Elias' codes if these are shorter than the fixed width.

    Receives are posted for the longest possible message; a header has the actual length.

    A piece's counts are coded when they are first sent. A message that replaces them at the end is forwarded unchanged.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._traffic = Traffic()
        lengths = [len(cut) for cut in self._pieces]
        self._messages = [aligned_empty(_ELIAS.nbytes(n, self._size), np.uint8) for n in lengths]
        longest = _ELIAS.nbytes(program.longest_piece, self._size)
        self._incoming = [aligned_empty(longest, np.uint8) for _ in range(self.receive_buffers)]
        self._scratch = _Scratch(program.longest_piece, longest)
        # weight and bytes of each message; 0 bytes: it comes from another rank
        self._coded = [(0, 0)] * len(lengths)

    @override
    def begin(self, traffic: Traffic, work: Round) -> None:
        super().begin(traffic, work)
        self._coded, self._traffic = [(0, 0)] * len(self._pieces), traffic
        self._finish_counts, self.finish = work.decode, self._decode_and_finish

    @override
    def end(self) -> None:
        super().end()
        del self._finish_counts

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        message, (coded, nbytes) = self._messages[piece], self._coded[piece]
        if coded != weight:
            start = self._traffic.clock()
            work = self._scratch.work
            nbytes = _ELIAS.write(self.counts[piece], len(self._pieces[piece]), weight, message, work)
            self._coded[piece] = weight, nbytes
            self._traffic.seconds_encoding += self._traffic.clock() - start
        nbytes = nbytes or message_bytes(message)
        return [message[:nbytes], nbytes, MPI.BYTE]

    @override
    def replacing(self, piece: int, weight: int) -> MessageMemory:
        message = self._messages[piece]
        self._coded[piece] = weight, 0
        return [message, message.nbytes, MPI.BYTE]

    @override
    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        nbytes = _ELIAS.nbytes(len(self._pieces[piece]), weight)
        return [self._incoming[buffer][:nbytes], nbytes, MPI.BYTE]

    @override
    def merge(self, message: Message, buffer: int) -> None:
        n, own = len(self._pieces[message.piece]), self._scratch
        _ELIAS.read(self._incoming[buffer], n, message.weight, own.decoded, own.work)
        self._add(message, own.decoded)

    def _decode_and_finish(self, piece: int) -> Testable | None:
        weight, nbytes = self._coded[piece]
        if weight == self._size and not nbytes:
            n, work = len(self._pieces[piece]), self._scratch.work
            _ELIAS.read(self._messages[piece], n, weight, self.counts[piece], work)
        return self._finish_counts(piece)


def _message(words: Words, count: int) -> MessageMemory:
    return [words[:count], 8 * count, MPI.BYTE]
