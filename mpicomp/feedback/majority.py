"""Majority votes of one vector: signs without a residual, ties decided by coins, and results of +-1."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from collectives.annotations import Array, Doubles, Testable, Words, override
from collectives.arrays import Device
from collectives.arrays.elements import narrow
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED, Sign
from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.base import Feedback, FiniteFlag, Problem, StepInput, bad_ranks, compute_type, words_of
from mpicomp.feedback.mirror import Packed
from mpicomp.feedback.vote_values import STREAMING_ELEMENTS
from mpicomp.kernels.streams import GROUP, Stream, source

COMMON = source(0)  # of coins that all ranks draw alike


class _Coins(threading.local):
    """A thread's memory for the coins of a piece."""

    def __init__(self, longest: int) -> None:
        self.words = np.empty(8 * -(-longest // GROUP), np.uint64)


class MajorityVotes(Feedback):
    """One vector's votes.

    Parameters
    ----------
    device : Device
        Where vectors are; counts are in the host's memory, and decided there.
    pieces : sequence of range
        Elements of each piece.
    counts : sequence of uint64 arrays
        The reducer's counts of each piece.
    dtype : str
        Of the vector.
    ranks : int
    stream : Stream
        Of the coins.
    """

    n_reports = 1
    reports_when = "beside"

    def __init__(
        self, device: Device, pieces: Sequence[range], counts: Sequence[Words], dtype: str, ranks: int, stream: Stream
    ) -> None:
        super().__init__(device, {})
        self._majority, self._random = kernels.of("cpu").vote_counts.majority, Sign().bind("cpu", stream)
        self._pieces, self._ranks, self._packed = pieces, ranks, Packed(device, counts, [1] * len(pieces))
        self._n = pieces[-1].stop if pieces else 0
        self._words = [-(-len(cut) // 64) for cut in pieces]
        kind = compute_type(dtype)
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        longest = max(map(len, pieces), default=0)
        self._coins = _Coins(longest) if ranks % 2 == 0 else None
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        ones = np.zeros(2, stored)
        narrow(np.array([1, -1], np.float32), dtype, ones)
        self._plus, self._minus = ones.view(UNSIGNED[stored.itemsize])
        # a piece's flag crosses in front of its signs
        self._finite = [
            FiniteFlag(device, None if self.on_host else self._packed.first_byte(piece)) for piece in range(len(pieces))
        ]
        self._nothing: Array = np.empty(0)
        self._step, self._streaming = 0, False
        self.end()

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        for finite in self._finite:
            finite.reset()
        self._step, self._values = call.step, call.values
        self._out = words_of(self.device, call.out)
        if self.on_host:
            self._streaming = self._n >= STREAMING_ELEMENTS and call.out.ctypes.data % 32 == 0

    @override
    def end(self) -> None:
        super().end()
        self._values = self._out = self._nothing

    @override
    def encode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._pack(piece)
            return None
        self.launch(self._pack, piece)
        return self._packed.fetch(piece, slice(self._words[piece]))

    def _pack(self, piece: int) -> None:
        cut, signs = self._pieces[piece], self._packed.pieces[piece][: self._words[piece]]
        values = self._values[cut.start : cut.stop]
        self._finite[piece].check(self.kernels.sign.pack, values, signs, self._step % 2 == 0, *self._constants)

    @override
    def report(self, row: Doubles) -> None:
        row[0] = not all(map(bool, self._finite))

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        return Problem(bad_ranks(reports[:, 0] != 0)) if reports.any() else None

    def decide(self, first: int, counts: Words, words: int) -> None:
        """Replace complete counts, from element `first` on, by the majority's signs.

        The coins depend on no rank, so any rank may decide.
        """
        coins = None
        if self._coins is not None:
            coins = self._coins.words[: 8 * -(-64 * words // GROUP)]
            self._random.draw(first, self._step, COMMON, (1, 1), coins)
        self._majority(counts, planes_of(self._ranks), words, self._ranks // 2, coins, counts)

    @override
    def decode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._unpack(piece)
            return None
        self._packed.deliver(piece, slice(self._words[piece]))
        self.launch(self._unpack, piece)
        return self.device.done()

    def _unpack(self, piece: int) -> None:
        cut, signs = self._pieces[piece], self._packed.pieces[piece][: self._words[piece]]
        out = self._out[cut.start : cut.stop]
        self.kernels.sign.unpack(signs, self._plus, self._minus, self._streaming, out)
