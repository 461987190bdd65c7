"""Majority votes of one vector: signs without a residual, ties decided by coins, and results of +-1."""

from __future__ import annotations

import threading

import numpy as np

from collectives.annotations import Doubles, override
from collectives.arrays.elements import narrow
from mpicomp import kernels
from mpicomp.codecs.sign import UNSIGNED, Sign
from mpicomp.codecs.vote_counts import planes_of
from mpicomp.feedback.base import Problem, StepInput, bad_ranks, compute_type
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

    n_reports = 1
    reports_when = "beside"

    def __init__(self, layout: VoteLayout, stream: Stream) -> None:
        super().__init__(layout, {})
        self._majority, self._random = kernels.of("cpu").vote_counts.majority, Sign().bind("cpu", stream)
        dtype, ranks = layout.dtype, layout.ranks
        kind = compute_type(dtype)
        self._constants = kind(0), np.nextafter(kind(0), kind(1))
        longest = max(map(len, layout.pieces), default=0)
        self._coins = _Coins(longest) if ranks % 2 == 0 else None
        stored = np.dtype(np.uint16 if dtype == "bfloat16" else dtype)
        ones = np.zeros(2, stored)
        narrow(np.array([1, -1], np.float32), dtype, ones)
        self._plus, self._minus = ones.view(UNSIGNED[stored.itemsize])
        self._is_finite, self._step = True, 0
        self.end()

    @override
    def rounds(self) -> tuple[Round, ...]:
        return (Round(self.encode, self.decode, complete=self.decide if self._ranks > 1 else None),)

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._is_finite, self._step = True, call.step

    @override
    def encode(self, piece: int) -> None:
        cut, signs = self._pieces[piece], self._counts[piece][: self._words[piece]]
        values = self._values[cut.start : cut.stop]
        if not self.kernels.sign.pack(values, signs, self._step % 2 == 0, *self._constants):
            self._is_finite = False  # only ever cleared: other threads do the same

    @override
    def report(self, row: Doubles) -> None:
        row[0] = not self._is_finite

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
    def decode(self, piece: int) -> None:
        cut, signs = self._pieces[piece], self._counts[piece][: self._words[piece]]
        out = self._out[cut.start : cut.stop]
        words = out.view(UNSIGNED[out.itemsize])
        self.kernels.sign.unpack(signs, self._plus, self._minus, self._streaming, words)
