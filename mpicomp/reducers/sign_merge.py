"""One bit per element on every hop: packed signs travel along a topology's plan and are merged on the way.

Each element of the result is the sign of one uniformly random rank. The signs of a small vector are gathered instead,
together with the ranks' reports: every rank merges those of all ranks in rank order with the same words, which takes
half the rounds of any topology.

Signs that a device has encoded stay there where MPI takes its memory: they are sent from it, received into it, and
merged there. The messages are the same, so that ranks may differ in this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from collectives import Communicator
from collectives.annotations import Array, Testable, Words, override
from collectives.arrays import wait
from collectives.arrays.elements import PAGE
from collectives.arrays.gpu_mpi import verdict
from collectives.dense.device_sum import DIRECT_BYTES
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from collectives.execution.staged import until_queued, use_in_background
from collectives.progress.polling import until
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import MessageModel, Reducer, Round
from mpicomp.aggregator.side_channel import SideChannel
from mpicomp.codecs.sign import Sign, SignMerger
from mpicomp.feedback.rounds import Work
from mpicomp.kernels.streams import GROUP, Stream, source
from mpicomp.spaces import HOST, DeviceSpace, Space

MOST_BUFFERS = 4
MEMORY_PART = 0.49  # largest part of a vector in receive buffers, which take two bits per element
MEMORY_MATTERS = 1 << 20  # elements from which pieces are short enough for `MEMORY_PART`
WORDS_A_PAGE = PAGE // 8
BRIEF_ELEMENTS = 1 << 18  # up to here encoding takes less time than accounting for pieces


class OneBitReducer(Reducer, Protocol):
    """Reducer that merges the ranks' packed signs.

    Attributes
    ----------
    pieces : sequence of range
        Range of elements of each piece.
    bits : uint64[ceil(n / 64)]
        This rank's signs, then the merged ones; an int64 tensor where they stay on a device.
    second : uint64[ceil(n / 64)] or None
        Signs of second winners.
    scratch : sequence of ndarray
        Memory that callers may use between two runs; it may include `bits`.
    """

    side_channel: SideChannel
    pieces: Sequence[range]
    bits: Array
    second: Array | None
    scratch: list[Words]


def message_model(n: int, piece_bytes: int) -> MessageModel:
    """Return the message model of merged signs."""
    codec = Sign()
    piece = 8 * piece_bytes
    if n >= MEMORY_MATTERS:
        piece = min(piece, n // 5)  # so that buffers stay below two bits per element
    return MessageModel(codec.nbytes, piece, codec.alignment)


def buffer_count(program: Program, n: int) -> int:
    """Return the number of receive buffers of a program, which together stay below `MEMORY_PART` of the vector."""
    if not any(message.held_weight for message in program.recvs):
        return 0
    return max(1, min(MOST_BUFFERS, int(MEMORY_PART * n / program.longest_piece)))


class SignMerge(OneBitReducer):
    """Reducer that merges signs along the plan of the communicator's topology.

    Parameters
    ----------
    comm : Communicator
    n : int
        Number of elements.
    sign : SignMerger
        The codec, bound to its kernels and the stream of the merges.
    reports : int
        Count of numbers that each rank reports to the others at each step.
    space : Space
        Memory of the signs, which MPI takes; `sign` is bound to its kernels.
    """

    def __init__(self, comm: Communicator, n: int, sign: SignMerger, reports: int, space: Space = HOST) -> None:
        model = message_model(n, comm.routes.packed_piece_bytes())
        self._tag = comm.fixed_tag()
        self.program = comm.routes.program(comm.select(Sign().nbytes(n)), n, model.alignment, model.piece_elements)
        self.payload, self._space = SignPayload(self.program, sign, comm.rank, space), space
        self.second = None
        self.pieces, self.bits, self.scratch = self.program.pieces, self.payload.bits, self.payload.scratch
        self.side_channel = SideChannel(comm, reports)
        # MPI libraries look up memory of GPUs when a message starts, which persistent requests may spare
        self._requests = comm.users.persistent(self) if space.is_host else None

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        payload = self.payload
        if isinstance(self._space, DeviceSpace):  # other calls may have made another device current
            use_in_background(call, self._space.device)
        payload.begin(call.step, work)
        try:
            yield from execute(call, self.program, payload, self._tag, call.traffic, encoded, self._requests)
        finally:
            payload.end()


class SignPayload:
    """Packed signs of one vector, and the words that merge them: a `collectives.execution.payload.MergedPayload`.

    Memory: one bit per element for the signs; each receive buffer takes one bit per element of a piece for the message
    and one for the words drawn ahead. The number of buffers is limited so that the total stays below two bits per
    element of the vector.

    Parameters
    ----------
    program : Program
    sign : SignMerger
    rank : int
    space : Space
        Of all this memory. A device's kernels are compiled here, as the first merge is part of a call.
    """

    encode: Work
    finish: Work

    def __init__(self, program: Program, sign: SignMerger, rank: int, space: Space = HOST) -> None:
        self.step, self._space, self._is_host = 0, space, space.is_host
        self._pieces = program.pieces
        n = self._pieces[-1].stop if self._pieces else 0
        self.brief = n <= BRIEF_ELEMENTS
        longest = program.longest_piece
        self.bits = space.empty(-(-n // 64), space.word)
        self.bits[:] = 0
        self._held = [self.bits[cut.start // 64 : -(-cut.stop // 64)] for cut in self._pieces]
        self._messages = [space.message(held) for held in self._held]
        self.receive_buffers = buffer_count(program, n)
        row = -(-longest // (64 * WORDS_A_PAGE)) * WORDS_A_PAGE
        self._incoming = space.empty(self.receive_buffers * row, space.word).reshape(self.receive_buffers, row)
        lengths = {len(held) for held in self._held}
        self._landing = {words: [space.message(memory[:words]) for memory in self._incoming] for words in lengths}
        drawn = 8 * -(-longest // GROUP)
        self._words = space.empty(self.receive_buffers * drawn, space.word).reshape(self.receive_buffers, drawn)
        self._drawn = [-1] * self.receive_buffers  # number of the receive whose words a buffer holds
        self._draw, self._merge = space.bound(sign.draw), space.bound(sign.merge)
        self._sources = [
            source(rank, ordinal) for ordinal in range(1 + max((m.ordinal for m in program.recvs), default=0))
        ]
        if not space.is_host:
            self._compile(program)

    def _compile(self, program: Program) -> None:
        """Merge zeros: one piece of each length, with each pair of weights."""
        forms = {(len(self._pieces[one.piece]), one.weight, one.held_weight): one for one in program.recvs}
        for message in forms.values():
            if message.held_weight:
                self.merge(message, 0)
        self._drawn = [-1] * self.receive_buffers
        wait(self._space.done())

    @property
    def scratch(self) -> list[Words]:
        """Memory of the host that callers may use between two runs."""
        return [self._incoming, self._words, self.bits] if self._is_host else []

    def begin(self, step: int, work: Round) -> None:
        """Start another step, with its random words."""
        self.encode, self.finish = work.encode, work.decode
        self.step = step
        self._drawn = [-1] * self.receive_buffers

    def end(self) -> None:
        """Drop the references to the feedback, which would keep it alive in a cycle."""
        del self.encode, self.finish

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the held bits; their size does not depend on the weight."""
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory of the held bits, which a message replaces."""
        return self._messages[piece]

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for bits that will be merged."""
        return self._landing[len(self._held[piece])][buffer]

    def prepare(self, message: Message, buffer: int) -> None:
        """Draw the words of a merge."""
        cut = self._pieces[message.piece]
        words = self._words[buffer, : 8 * -(-len(cut) // GROUP)]
        weights = message.weight, message.held_weight
        self._draw(cut.start, self.step, self._sources[message.ordinal], weights, words)
        self._drawn[buffer] = message.index

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Replace each held bit by the message's if the random words select that."""
        if self._drawn[buffer] != message.index:
            self.prepare(message, buffer)
        self._merge(self._words[buffer], self._incoming[buffer], self._held[message.piece])
        # MPI may read the piece, and receive into the buffer, from its end on
        return None if self._is_host else self._space.done()


def sign_reducer(comm: Communicator, n: int, stream: Stream, reports: int, space: Space = HOST) -> OneBitReducer:
    """Return the reducer that suits a vector of `n` elements.

    Parameters
    ----------
    comm, n, reports
        As in `SignMerge`.
    stream : Stream
        Random words of the merges.
    space : Space
        Where signs are encoded; they stay there if they are long and MPI takes its memory.
    """
    nbytes = Sign().nbytes(n)
    if comm.routes.gathers(nbytes):
        return SignGather(comm, n, Sign().bind("cpu", stream), reports)
    if not space.is_host and nbytes >= DIRECT_BYTES and verdict.takes_memory(comm.mpi_comm, space.name):
        return SignMerge(comm, n, Sign().bind("cuda", stream), reports, space)
    return SignMerge(comm, n, Sign().bind("cpu", stream), reports)


class SignGather(OneBitReducer):
    """Reducer that sends every rank's signs to every rank. Parameters as in `SignMerge`."""

    brief = at_once = True

    def __init__(self, comm: Communicator, n: int, sign: SignMerger, reports: int) -> None:
        # `SignMerge` has a tag of its own. Newcomers make their aggregators alone, and must take as many tags.
        comm.fixed_tag()
        self._observer = comm.observer
        self.pieces = [range(n)] if n else []
        self.scratch: list[Words] = []
        self.second = None
        self.side_channel = SideChannel(comm, reports, 8 * -(-n // 64))
        self.bits = self.side_channel.tail.view(np.uint64)
        self._signs = [tail.view(np.uint64) for tail in self.side_channel.tails]
        self._words = np.empty((comm.size - 1, 8 * -(-n // GROUP)), np.uint64)
        self._sign = sign
        self._sources = [source(rank) for rank in range(comm.size)]
        self._drawn = -1  # step of the drawn words

    @override
    def prepare_step(self, step: int) -> None:
        if self._drawn != step:
            for held, words in enumerate(self._words, 1):
                self._sign.draw(0, step, self._sources[held], (1, held), words)
            self._drawn = step

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        traffic = call.traffic
        clock = traffic.clock
        start = clock()
        for piece in range(len(self.pieces)):
            if (handle := work.encode(piece)) is not None:
                yield from until(handle, call)
        encoded()
        sent = clock()
        if call.compare is None and self._drawn != call.step:  # else it is drawn while the ranks compare the call
            self.prepare_step(call.step)
        drawn = clock()
        yield from self.side_channel.collect(call, traffic)
        arrived = clock()
        if self._drawn != call.step:  # the comparison was made with another reducer's words
            self.prepare_step(call.step)
        if self._words.size:
            self.bits[:] = self._signs[0]
            for words, incoming in zip(self._words, self._signs[1:], strict=True):
                self._sign.merge(words, incoming, self.bits)
        merged = clock()
        for piece in range(len(self.pieces)):
            if (handle := work.decode(piece)) is not None:
                yield from until_queued(call, handle)  # there is one piece at most
        end = clock()
        traffic.seconds_encoding += sent - start
        traffic.seconds_waiting += arrived - drawn
        traffic.seconds_merging += merged - arrived + drawn - sent
        traffic.seconds_decoding += end - merged
        traffic.seconds_total += end - start
        if self._observer is not None:
            spans = {"encode": (start, sent), "prepare": (sent, drawn), "merge": (arrived, merged)}
            self._observer.phases(**spans, decode=(merged, end))
