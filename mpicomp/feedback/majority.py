"""Majority votes of one vector: signs without a residual, ties decided by coins, and results of +-1."""

from __future__ import annotations

import threading

import numpy as np

from collectives.annotations import Array, Doubles, override
from collectives.arrays.elements import narrow
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED, Sign
from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.base import Problem, StepInput, bad_ranks, compute_type, words_of
from mpicomp.feedback.finite_flag import FiniteFlag
from mpicomp.feedback.rounds import Round
from mpicomp.feedback.votes import VoteLayout, Votes
from mpicomp.kernels.streams import GROUP, Stream, source

COMMON = source(0)  # of coins, which are the same on all ranks


class _Coins(threading.local):
    """A thread's memory for the coins of a piece."""

    def __init__(self, longest: int) -> None:
        self.words = np.empty(8 * -(-longest // GROUP), np.uint64)


class MajorityVotes(Votes):
    """One vector's votes.

    Parameters
    ----------
    layout : VoteLayout
        Counts are decided on the host.
    stream : Stream
        Random words of the coins.
    """

    has_decided_bits = True
    n_reports = 1
    reports_when = "beside"

    def __init__(self, layout: VoteLayout, stream: Stream) -> None:
        super().__init__(layout, {}, [1] * len(layout.pieces))
        self._majority, self._random = kernels.of("cpu").vote_counts.majority, Sign().bind("cpu", stream)
        self._counts, dtype, ranks = layout.counts, layout.dtype, layout.ranks
        kind = compute_type(dtype)
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        longest = max(map(len, layout.pieces), default=0)
        self._coins = _Coins(longest) if ranks % 2 == 0 else None
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        ones = np.zeros(2, stored)
        narrow(np.array([1, -1], np.float32), dtype, ones)
        self._plus, self._minus = ones.view(UNSIGNED[stored.itemsize])
        # a piece's flag crosses in front of its signs
        self._finite = [
            FiniteFlag(layout.device, None if self.on_host else self._packed.first_byte(piece))
            for piece in range(len(layout.pieces))
        ]
        self._step = 0
        self.end()

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, complete=self.decide if self._ranks > 1 else None),)

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        for finite in self._finite:
            finite.reset()
        self._step = call.step

    @override
    def _write_signs(self, piece: int) -> None:
        cut, signs = self._pieces[piece], self._packed.pieces[piece][: self._words[piece]]
        values = self._values[cut.start : cut.stop]
        self._finite[piece].check(self.kernels.sign.pack, values, signs, self._step % 2 == 0, *self._constants)

    @override
    def report(self, row: Doubles) -> None:
        row[0] = not all(map(bool, self._finite))

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        return Problem(bad_ranks(reports[:, 0] != 0)) if reports.any() else None

    def decide(self, piece: int) -> None:
        """Replace complete counts by the majority's signs. The coins depend on no rank, so any rank may decide."""
        first, counts, words, coins = self._pieces[piece].start, self._counts[piece], self._words[piece], None
        if self._coins is not None:
            coins = self._coins.words[: 8 * -(-64 * words // GROUP)]
            self._random.draw(first, self._step, COMMON, (1, 1), coins)
        self._majority(counts, planes_of(self._ranks), words, self._ranks // 2, coins, counts)

    @override
    def _write_result(self, piece: int, target: Array, out: Array) -> None:
        cut, signs = self._pieces[piece], self._packed.pieces[piece][: self._words[piece]]
        words = words_of(self.device, out[cut.start : cut.stop])
        self.kernels.sign.unpack(signs, self._plus, self._minus, self._streaming, words)
