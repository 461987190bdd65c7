"""Marsit with all its ranks in one process, from the definition, the plans, the codec and the documented streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs import Draw, Sign
from tests.reference.one_process.allreduce import dense, hops, rounded
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.shared_selection import votes_of, winners
from tests.reference.signs import encode_own, encode_plain, magnitude_from, pack_bits, signs, unpack_bits

AVERAGE = 0.9
GAMMA = 4.0


class OneProcess(Simulation):
    """A run of Marsit."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        self.gamma = GAMMA if self.options.gamma == "auto" else self.options.gamma
        self.averages: NDArray[np.float64] | None = None

    def compute_step(self, g: Vectors) -> Vectors:
        every = self.options.full_precision_every
        if every is None or self.t % every:
            return self.one_bit(g)
        result = dense(self.topology, g + self.residuals, "mean")
        self.residuals[:] = 0
        self.follow(g)
        return result

    def state(self, rank: int) -> dict[str, Vectors]:
        return {"residual": self.residuals[rank]} if self.options.compensation else {}

    def one_bit(self, u: Vectors) -> Vectors:
        s, limit = self.steps(u)
        w, clipped = u + self.residuals, 0
        packed = np.empty((self.size, -(-self.n // 64)), np.uint64)
        for rank in range(self.size):
            if not self.options.compensation:
                packed[rank] = encode_plain(u[rank], self.t % 2 == 0).bits
            elif self.options.residual == "own":
                encoded = encode_own(u[rank], self.residuals[rank], s, limit)
                packed[rank], self.residuals[rank] = encoded.bits, encoded.residual
                clipped += encoded.clipped
            else:
                packed[rank] = pack_bits(signs(w[rank], None))
        result = self.vote(packed, s)
        if self.options.compensation and self.options.residual == "paper":
            self.residuals = w - result
        self.follow(u)
        if self.options.gamma == "auto":
            fraction = clipped / (self.n * self.size)
            self.gamma = min(16.0, max(0.25, self.gamma * math.exp(0.2 * (fraction - 0.015))))
        return result

    def vote(self, packed: NDArray[np.uint64], s: Vectors) -> Vectors:
        """S times one rank's sign, or the mean of the winners'; `packed` is overwritten."""
        if self.options.winners is None:
            votes = unpack_bits(self.merged(packed), self.n)[None]
        else:
            positive = np.array([unpack_bits(row, self.n) for row in packed])
            stream = self.stream("selection")
            votes = votes_of(positive, winners(self.n, self.size, self.options.winners, stream, self.t))
        return np.where(votes.all(axis=0), s, np.where(votes.any(axis=0), self.compute(0), -s))

    def merged(self, bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What the ranks' packed signs become; `bits` is overwritten."""
        stream = self.stream("merge")
        if self.gathers:
            for rank in range(1, self.size):
                merge(bits[0], bits[rank], self.n, (rank, 1), Draw(stream, self.t, rank))
            return bits[0]
        for hop in hops(self.topology, self.size, self.n, Sign().alignment):
            words = slice(hop.start // 64, -(-hop.stop // 64))
            incoming, held = bits[hop.source, words], bits[hop.destination, words]
            if hop.held_weight:
                draw = Draw(stream, self.t, hop.destination, hop.ordinal, hop.start)
                merge(held, incoming, hop.stop - hop.start, (hop.held_weight, hop.weight), draw)
            else:
                held[:] = incoming
        assert (bits == bits[0]).all()
        return bits[0]

    # The global step -------------------------------------------------------------------------------------------------

    def steps(self, u: Vectors) -> tuple[Vectors, Vectors]:
        """Of each element: s as the result can hold it, and the residual's bound."""
        if self.options.global_step == "auto":
            if self.averages is None:
                self.follow(u)
            assert self.averages is not None
            s = (self.gamma * self.averages).astype(self.compute)
        else:
            s = np.full(self.lengths.size, self.options.global_step, self.compute)
        s = rounded(s, self.dtype).astype(self.compute)
        return self.spread(s), self.spread(s * self.compute(self.options.clip))

    def follow(self, u: Vectors) -> None:
        """Take in the mean of |u|."""
        means = sum(self.totals(u, magnitude_from)) / (self.lengths * self.size)
        past = self.averages
        self.averages = means if past is None else AVERAGE * past + (1 - AVERAGE) * means


def merge(held: NDArray[np.uint64], incoming: NDArray[np.uint64], n: int, weights: tuple[int, int], draw: Draw) -> None:
    held_weight, incoming_weight = weights
    both = held.view(np.uint8), incoming.view(np.uint8)
    Sign().merge(*both, n, held_weight=held_weight, incoming_weight=incoming_weight, draw=draw)
