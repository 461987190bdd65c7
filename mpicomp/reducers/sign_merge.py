"""One bit per element on every hop: how Marsit's packed signs, and what else the ranks report, get round.

`SignMerge` sends them along a topology's plan; `SignGather`, for small vectors, in one all-gather. Either way each
element of the result is the sign of one uniformly random rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import Communicator, Traffic
from collectives.execution.program import Message, Program
from collectives.execution.requests import Repeated
from collectives.memory import PAGE, aligned_empty
from mpicomp.aggregator.base import MessageModel
from mpicomp.codecs.sign import Sign, mix_words, scratch
from mpicomp.kernels.cpu.philox import merge_words
from mpicomp.kernels.streams import GROUP, Stream, source

MOST_SLOTS = 4
MEMORY_PART = 0.49  # of the vector's elements that may be under way: two bits each, beside the one bit held
MEMORY_MATTERS = 1 << 20
WORDS_A_PAGE = PAGE // 8
BRIEF_ELEMENTS = 1 << 18  # up to here encoding takes less than keeping account of pieces

Encode = Callable[[int], None]


class SideChannel:
    """What every rank tells every other beside the bits: a few numbers, in one all-gather.

    Parameters
    ----------
    comm : Communicator
    count : int
        Numbers.
    words : int
        64-bit words that travel behind the numbers.

    Attributes
    ----------
    mine : float64[count]
        Filled in before `start`.
    everyones : float64[ranks, count]
        There after `collect`.
    tail : uint64[words]
        What travels behind this rank's numbers; after `collect`, `tails` has everyone's.
    """

    def __init__(self, comm: Communicator, count: int, words: int = 0) -> None:
        self._comm, self._pending = comm, False
        self._row = aligned_empty(count + words, np.uint64)
        self._rows = aligned_empty(comm.size * self._row.size, np.uint64).reshape(comm.size, -1)
        self._row[:] = 0
        self._rows[:] = 0
        self.mine, self.tail = self._row[:count].view(np.float64), self._row[count:]
        self._numbers, self.tails = self._rows[:, :count].view(np.float64), self._rows[:, count:]
        self.everyones = np.zeros((comm.size, count))
        self._gather: Repeated | None = None

    def start(self) -> None:
        """Send this rank's numbers, and do not wait."""
        if self._comm.size == 1:
            self.everyones[0] = self.mine
            return
        if self._gather is None:
            # Collective: only now are all ranks known to have started the same method.
            mpi_comm, ends = self._comm.mpi_comm, (self._row, self._rows)
            self._gather = Repeated(lambda: mpi_comm.Allgather_init(*ends), lambda: mpi_comm.Iallgather(*ends))
            self._comm.free_after(self, self._gather.free)
        self._gather.start()
        self._pending = True

    def arrived(self) -> bool:
        """Whether `collect` would not have to wait."""
        return self._gather is None or not self._pending or bool(self._gather.request.Test())

    def collect(self, traffic: Traffic) -> None:
        """Wait for everyone's numbers, if any are on their way."""
        if self._gather is None or not self._pending:
            return
        comm = self._comm
        request = self._gather.request
        comm.wait(
            request,
            lambda: f"rank {comm.rank} of {comm.size}: the other ranks' side_channel do not arrive",
            "side_channel",
        )
        self._pending = False
        self.everyones[:] = self._numbers
        traffic.bytes_sent += self._row.nbytes * (comm.size - 1)
        traffic.messages += comm.size - 1


class OneBitExchange(Protocol):
    """Makes the ranks' packed signs into the merged ones.

    Attributes
    ----------
    pieces : sequence of range
        Elements of each piece.
    bits : uint64[ceil(n / 64)]
        This rank's signs, then the merged ones.
    side_channel : SideChannel
    spare : sequence of ndarray
        Memory that others may use between two runs, the bits' too.
    """

    pieces: Any
    bits: NDArray[np.uint64]
    side_channel: SideChannel
    spare: list[NDArray[np.uint64]]

    def prepare(self, step: int) -> None:
        """Do ahead what a step needs no vector for; may be left out."""

    def run(self, step: int, traffic: Traffic, encoded: Callable[[], None]) -> None:
        """Call encode for every piece, `encoded` once they all are, and finish for every piece that is merged."""


def one_bit_exchange(
    comm: Communicator, n: int, stream: Stream, tag: int, side_channel: int, encode: Encode, finish: Encode
) -> OneBitExchange:
    """The way that suits a vector of `n` elements.

    stream : of the merges. tag : of the messages. side_channel : numbers that each rank tells the others at each step.
    encode, finish : turn this rank's piece into bits; turn the final bits of a piece into the result.
    """
    way = SignGather if comm.gathers(Sign().nbytes(n)) else SignMerge
    return way(comm, n, stream, tag, side_channel, encode, finish)


def wire(n: int, piece_bytes: int) -> MessageModel:
    """See `Algorithm.message_model`."""
    codec = Sign()
    piece = 8 * piece_bytes
    if n >= MEMORY_MATTERS:
        piece = min(piece, n // 5)  # so that buffers stay below two bits per element
    return MessageModel(codec.nbytes, piece, codec.alignment)


class SignGather:
    """One all-gather brings every rank's bits to every rank, and each merges them in rank order with the same words.

    It takes half the rounds of any other way, and all numbers travel with the bits. Parameters as in
    `one_bit_exchange`.
    """

    def __init__(
        self, comm: Communicator, n: int, stream: Stream, tag: int, side_channel: int, encode: Encode, finish: Encode
    ) -> None:
        self._trace = comm.trace
        self.pieces = [range(n)] if n else []
        self.spare: list[NDArray[np.uint64]] = []
        self.side_channel = SideChannel(comm, side_channel, -(-n // 64))
        self.bits = self.side_channel.tail
        self._encode, self._finish = encode, finish
        self._words = np.empty((comm.size - 1, 8 * -(-n // GROUP)), np.uint64)
        self._schedule, self._scratch = stream.schedule(), scratch()
        self._sources = [source(rank) for rank in range(comm.size)]
        self._drawn = -1  # for which step there are words

    def prepare(self, step: int) -> None:
        """See `OneBitExchange`: draw the words of all merges."""
        if self._drawn != step:
            at = np.uint64(step & 0xFFFFFFFF)
            for held, words in enumerate(self._words, 1):
                mix_words(self._schedule, (0, at, self._sources[held]), (1, held), self._scratch, words)
            self._drawn = step

    def run(self, step: int, traffic: Traffic, encoded: Callable[[], None]) -> None:
        """See `OneBitExchange`."""
        clock = traffic.clock
        start = clock()
        for piece in range(len(self.pieces)):
            self._encode(piece)
        encoded()
        sent = clock()
        self.prepare(step)
        drawn = clock()
        self.side_channel.collect(traffic)
        arrived = clock()
        if self._words.size:
            self.bits[:] = self.side_channel.tails[0]
            for words, incoming in zip(self._words, self.side_channel.tails[1:], strict=True):
                merge_words(words, incoming, self.bits)
        merged = clock()
        for piece in range(len(self.pieces)):
            self._finish(piece)
        end = clock()
        traffic.seconds_encoding += sent - start
        traffic.seconds_waiting += arrived - drawn
        traffic.seconds_merging += merged - arrived + drawn - sent
        traffic.seconds_decoding += end - merged
        traffic.seconds_total += end - start
        if self._trace is not None:
            spans = {"encode": (start, sent), "prepare": (sent, drawn), "merge": (arrived, merged)}
            self._trace.phases(**spans, decode=(merged, end))


class SignMerge:
    """The bits go along the plan of the communicator's topology, merged on the way.

    Parameters as in `one_bit_exchange`.
    """

    def __init__(
        self, comm: Communicator, n: int, stream: Stream, tag: int, side_channel: int, encode: Encode, finish: Encode
    ) -> None:
        codec, shape = Sign(), wire(n, comm.packed_piece_bytes())
        self._comm, self._tag = comm, tag
        self._program = comm.program(comm.select(codec.nbytes(n)), n, shape.alignment, shape.piece_elements)
        self.payload = OneBitPayload(self._program, stream, comm.rank, encode, finish)
        self.pieces, self.bits, self.spare = self._program.pieces, self.payload.bits, self.payload.spare
        self.side_channel = SideChannel(comm, side_channel)
        self._requests = comm.persistent(self)

    def prepare(self, step: int) -> None:
        """See `OneBitExchange`: words are drawn piece by piece, when there is nothing else to do."""

    def run(self, step: int, traffic: Traffic, encoded: Callable[[], None]) -> None:
        """See `OneBitExchange`."""
        self.payload.begin(step)
        self._comm.execute(self._program, self.payload, self._tag, traffic, encoded, self._requests)


class OneBitPayload:
    """Packed signs of one vector, and the words that merge them.

    Memory: one bit per element held, and per slot one for what comes in and one for the words drawn ahead; slots are as
    many as keep all of it below two bits per element.

    Parameters
    ----------
    program : Program
    stream : Stream
        Of the merges.
    rank : int
    encode, finish : callable
        Turn this rank's piece into bits; turn the final bits of a piece into the result.
    """

    def __init__(self, program: Program, stream: Stream, rank: int, encode: Encode, finish: Encode) -> None:
        self.encode, self.finish = encode, finish
        self.step = np.uint64(0)
        self._pieces = program.pieces
        n = self._pieces[-1].stop if self._pieces else 0
        self.brief = n <= BRIEF_ELEMENTS
        longest = program.longest_piece
        self.bits = aligned_empty(-(-n // 64), np.uint64)
        self.bits[:] = 0
        self._held = [self.bits[cut.start // 64 : -(-cut.stop // 64)] for cut in self._pieces]
        self._messages = [[held, held.nbytes, MPI.BYTE] for held in self._held]
        merging = any(message.held_weight for message in program.recvs)
        self.slots = max(1, min(MOST_SLOTS, int(MEMORY_PART * n / longest))) if merging else 0
        groups = -(-longest // GROUP)
        row = -(-longest // (64 * WORDS_A_PAGE)) * WORDS_A_PAGE
        self._incoming = aligned_empty(self.slots * row, np.uint64).reshape(self.slots, row)
        self._words = np.empty((self.slots, 8 * groups), np.uint64)
        self._drawn = [-1] * self.slots  # which receive's words a slot holds
        self._schedule, self._scratch = stream.schedule(), scratch()
        self._sources = [
            source(rank, ordinal) for ordinal in range(1 + max((m.ordinal for m in program.recvs), default=0))
        ]

    @property
    def spare(self) -> list[NDArray[np.uint64]]:
        """Memory that others may use between two runs."""
        return [self._incoming, self._words, self.bits]

    @property
    def nbytes(self) -> int:
        """Memory of all buffers."""
        return self.bits.nbytes + self._incoming.nbytes + self._words.nbytes + self._scratch.nbytes

    def begin(self, step: int) -> None:
        """Go to another step's random words."""
        self.step = np.uint64(step & 0xFFFFFFFF)
        self._drawn = [-1] * self.slots

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: the held bits themselves, whatever they weigh."""
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._messages[piece]

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        """See `Payload`."""
        words = self._held[piece].size
        return [self._incoming[slot, :words], 8 * words, MPI.BYTE]

    def prepare(self, message: Message, slot: int) -> None:
        """Draw the words of a merge."""
        cut = self._pieces[message.piece]
        at = (cut.start, self.step, self._sources[message.ordinal])
        words = self._words[slot, : 8 * -(-len(cut) // GROUP)]
        mix_words(self._schedule, at, (message.weight, message.held_weight), self._scratch, words)
        self._drawn[slot] = message.index

    def merge(self, message: Message, slot: int) -> None:
        """Take each bit from what landed or leave it, as the words say."""
        if self._drawn[slot] != message.index:
            self.prepare(message, slot)
        held = self._held[message.piece]
        merge_words(self._words[slot], self._incoming[slot], held)
