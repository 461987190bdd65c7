"""Counts that travel in messages of their own length, in Elias' codes where these are shorter than the fixed width."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Traffic
from collectives.execution.program import Message, Program
from collectives.memory import aligned_empty
from mpicomp.codecs.elias_counts import Elias, message_bytes, scratch
from mpicomp.reducers.sign_merge import Encode
from mpicomp.reducers.vote_count import VoteCountPayload

_CODEC = Elias()


class EliasPayload(VoteCountPayload):
    """Receives are posted for the longest message there can be; a header tells how long it is.

    A piece's counts are coded when they are first sent. What lands in their place at the end is forwarded as it is.
    Parameters as in `VoteCountPayload`.
    """

    def __init__(self, program: Program, encode: Encode, finish: Encode) -> None:
        super().__init__(program, encode, self._decode_and_finish)
        self._finish_counts = finish
        self._traffic = Traffic()
        lengths = [len(cut) for cut in self._pieces]
        self._messages = [aligned_empty(_CODEC.nbytes(n, self._size), np.uint8) for n in lengths]
        longest = _CODEC.nbytes(program.longest_piece, self._size)
        self._landing = [aligned_empty(longest, np.uint8) for _ in range(self.slots)]
        self._decoded = np.empty(longest // 8, np.uint64)
        self._work = scratch(program.longest_piece)
        self._coded = [(0, 0)] * len(lengths)  # of each message: weight, and bytes; 0 bytes: it lands, or has landed

    def begin(self, step: int, traffic: Traffic) -> None:
        """Go to another step, whose cost is counted into `traffic`."""
        self._coded, self._traffic = [(0, 0)] * len(self._pieces), traffic

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        message, (coded, nbytes) = self._messages[piece], self._coded[piece]
        if coded != weight:
            start = self._traffic.clock()
            nbytes = _CODEC.write(self.counts[piece], len(self._pieces[piece]), weight, message, self._work)
            self._coded[piece] = weight, nbytes
            self._traffic.seconds_encoding += self._traffic.clock() - start
        nbytes = nbytes or message_bytes(message)
        return [message[:nbytes], nbytes, MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        message = self._messages[piece]
        self._coded[piece] = weight, 0
        return [message, message.nbytes, MPI.BYTE]

    def incoming(self, piece: int, slot: int, weight: int) -> Any:
        """See `Payload`."""
        nbytes = _CODEC.nbytes(len(self._pieces[piece]), weight)
        return [self._landing[slot][:nbytes], nbytes, MPI.BYTE]

    def merge(self, message: Message, slot: int) -> None:
        """Decode and add what landed."""
        n = len(self._pieces[message.piece])
        _CODEC.read(self._landing[slot], n, message.weight, self._decoded, self._work)
        self._add(message, self._decoded)

    def _decode_and_finish(self, piece: int) -> None:
        weight, nbytes = self._coded[piece]
        if weight == self._size and not nbytes:
            _CODEC.read(self._messages[piece], len(self._pieces[piece]), weight, self.counts[piece], self._work)
        self._finish_counts(piece)
