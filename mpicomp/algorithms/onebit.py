"""One bit per element on every hop: the payload that Marsit sends through the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.program import Message, Program
from mpicomp.codecs.sign import mix_words, scratch
from mpicomp.kernels.random import merge_words
from mpicomp.random import GROUP, Stream, source

MOST_SLOTS = 4
MEMORY_PART = 0.49  # of the vector's elements that may be under way: two bits each, beside the one bit held


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

    lasting = True

    def __init__(
        self, program: Program, stream: Stream, rank: int, encode: Callable[[int], None], finish: Callable[[int], None]
    ) -> None:
        self.encode, self.finish = encode, finish
        self.step = np.uint64(0)
        self._pieces = program.pieces
        n = self._pieces[-1].stop if self._pieces else 0
        longest = program.longest_piece
        self.bits = np.zeros(-(-n // 64), np.uint64)
        self._held = [self.bits[cut.start // 64 : -(-cut.stop // 64)] for cut in self._pieces]
        self._messages = [[held, held.nbytes, MPI.BYTE] for held in self._held]
        merging = any(message.held_weight for message in program.recvs)
        self.slots = max(1, min(MOST_SLOTS, int(MEMORY_PART * n / longest))) if merging else 0
        groups = -(-longest // GROUP)
        self._incoming = np.empty((self.slots, -(-longest // 64)), np.uint64)
        self._words = np.empty((self.slots, 8 * groups), np.uint64)
        self._drawn = [-1] * self.slots  # which receive's words a slot holds
        self._schedule, self._scratch = stream.schedule(), scratch()
        self._sources = [
            source(rank, ordinal) for ordinal in range(1 + max((m.ordinal for m in program.recvs), default=0))
        ]

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
