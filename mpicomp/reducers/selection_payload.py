"""What goes round where the ranks draw alike who wins each element: the payloads of all ranks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.memory import aligned_empty
from collectives.testable import Testable
from mpicomp.codecs.shared_selection import Selection, Winners
from mpicomp.reducers.sign_merge import BRIEF_ELEMENTS, SignFeedback


class SelectionPayload:
    """The payloads of all ranks; see `Payload`.

    Memory: W bits an element for payloads, and the winners, 0.71 bits an element at most.

    Attributes
    ----------
    words : list of uint64[ranks, words]
        Per piece, the payload of each rank.
    bits : uint64[ceil(n / 64)]
        This rank's signs, then the first winners'.
    second : uint64[ceil(n / 64)] or None
        The second winners' signs, where there are any.
    """

    receive_buffers = 0

    def __init__(self, selection: Selection, rank: int, cuts: tuple[range, ...]) -> None:
        codec = selection.codec
        self._selection, self._rank, self._size, self._cuts = selection, rank, codec.ranks, cuts
        self.brief = not cuts or cuts[-1].stop <= BRIEF_ELEMENTS
        self._winners = [self._reserve(len(cut)) for cut in cuts]
        self.words = [aligned_empty(self._size * w.words, np.uint64).reshape(self._size, -1) for w in self._winners]
        size = -(-cuts[-1].stop // 64) if cuts else 0
        self.bits, self.second = self._zeros(size), self._zeros(size) if codec.votes == 2 else None
        votes = [vote for vote in (self.bits, self.second) if vote is not None]
        self._votes = [[vote[cut.start // 64 : -(-cut.stop // 64)] for vote in votes] for cut in cuts]
        self._drawn = [-1] * len(cuts)  # the step whose winners a piece has
        self._missing, self._counting = [self._size] * len(cuts), threading.Lock()
        self._step = 0
        self._feedback: SignFeedback | None = None

    def _reserve(self, n: int) -> Winners:
        return self._selection.reserve(n)

    @staticmethod
    def _zeros(words: int) -> Any:
        """Memory for signs."""
        zeros = aligned_empty(words, np.uint64)
        zeros[:] = 0
        return zeros

    def begin(self, step: int, feedback: SignFeedback) -> None:
        """Go to another step's winners."""
        self._step, self._feedback = step, feedback
        self._missing = [self._size] * len(self._cuts)

    def end(self) -> None:
        """Let go of the feedback: a payload that kept it would keep it alive in a cycle."""
        self._feedback = None

    def draw(self, step: int) -> None:
        """Draw the winners of all pieces."""
        for k in range(len(self._cuts)):
            self._draw(k, step)

    def _draw(self, k: int, step: int) -> None:
        if self._drawn[k] != step:
            self._selection.draw(self._winners[k], step, self._cuts[k].start)
            self._drawn[k] = step

    def mine(self, k: int) -> NDArray[np.uint64]:
        """The payload that this rank sends of a piece."""
        payload: NDArray[np.uint64] = self.words[k][self._rank]
        return payload

    def encode(self, piece: int) -> Testable | None:
        """See `Payload`: take signs, and pick those that this rank wins."""
        assert self._feedback is not None
        k = piece % len(self._cuts)
        self._feedback.encode(k)
        self._draw(k, self._step)
        return self._pick(k)

    def _pick(self, k: int) -> Testable | None:
        self._selection.encode(self._votes[k][0], self._rank, self._winners[k], self.mine(k))
        return None

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        origin, k = divmod(piece, len(self._cuts))
        row = self.words[k][origin]
        return [row, row.nbytes, MPI.BYTE]

    replacing = outgoing

    def finish(self, piece: int) -> Testable | None:
        """See `Payload`: once the last rank's is there, put all signs in their places."""
        assert self._feedback is not None
        k = piece % len(self._cuts)
        with self._counting:
            self._missing[k] -= 1
            complete = not self._missing[k]
        if not complete:
            return None
        self._place(k)
        return self._feedback.finish(k)

    def _place(self, k: int) -> None:
        words = self.words[k]
        self._selection.decode(words.reshape(-1), words.shape[1], self._winners[k], self._votes[k])
