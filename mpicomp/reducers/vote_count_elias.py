"""Counts that travel in messages of their own length, in Elias' codes where these are shorter than the fixed width."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from collectives import Traffic
from collectives.execution.program import Message, Program
from collectives.memory import aligned_empty
from mpicomp.codecs.elias_counts import Elias, message_bytes, scratch
from mpicomp.codecs.vote_counts import AddCounts
from mpicomp.reducers.sign_merge import SignFeedback
from mpicomp.reducers.vote_count import Decide, VoteCountPayload

_CODEC = Elias()


class EliasPayload(VoteCountPayload):
    """Receives are posted for the longest message there can be; a header tells how long it is.

    A piece's counts are coded when they are first sent. A message that replaces them at the end is forwarded as it is.
    Parameters as in `VoteCountPayload`.
    """

    def __init__(self, program: Program, add_counts: AddCounts) -> None:
        super().__init__(program, add_counts)
        self._traffic = Traffic()
        lengths = [len(cut) for cut in self._pieces]
        self._messages = [aligned_empty(_CODEC.nbytes(n, self._size), np.uint8) for n in lengths]
        longest = _CODEC.nbytes(program.longest_piece, self._size)
        self._buffers = [aligned_empty(longest, np.uint8) for _ in range(self.receive_buffers)]
        self._decoded = np.empty(longest // 8, np.uint64)
        self._work = scratch(program.longest_piece)
        self._coded = [(0, 0)] * len(lengths)  # of each message: weight, and bytes; 0 bytes: it arrives, or has arrived

    def begin(self, traffic: Traffic, feedback: SignFeedback, decide: Decide | None) -> None:
        """See `VoteCountPayload`."""
        super().begin(traffic, feedback, decide)
        self._coded, self._traffic = [(0, 0)] * len(self._pieces), traffic
        self._finish_counts, self.finish = feedback.finish, self._decode_and_finish

    def end(self) -> None:
        """See `VoteCountPayload`."""
        super().end()
        del self._finish_counts

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

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        nbytes = _CODEC.nbytes(len(self._pieces[piece]), weight)
        return [self._buffers[buffer][:nbytes], nbytes, MPI.BYTE]

    def merge(self, message: Message, buffer: int) -> None:
        """Decode and add the counts of a message."""
        n = len(self._pieces[message.piece])
        _CODEC.read(self._buffers[buffer], n, message.weight, self._decoded, self._work)
        self._add(message, self._decoded)

    def _decode_and_finish(self, piece: int) -> None:
        weight, nbytes = self._coded[piece]
        if weight == self._size and not nbytes:
            _CODEC.read(self._messages[piece], len(self._pieces[piece]), weight, self.counts[piece], self._work)
        self._finish_counts(piece)
