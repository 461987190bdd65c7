"""Marsit with all its ranks in one process, from the definition, the plans, the codec and the documented streams."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.schedules.plan import Topology
from mpicomp import Marsit
from mpicomp.codecs import Draw, Sign
from mpicomp.kernels.streams import Stream
from tests.reference.one_process.allreduce import dense, hops, rounded
from tests.reference.shared_selection import votes_of, winners
from tests.reference.signs import BLOCK, encode_own, encode_plain, magnitudes, pack_bits, signs, unpack_bits

AVERAGE = 0.9
GAMMA = 4.0

Vectors = NDArray[Any]


class OneProcess:
    """A run of Marsit.

    Parameters
    ----------
    options : Marsit
    topology : Topology or None
        None: small vectors under "auto", of which every rank gets every other's.
    size, n : int
        Ranks and elements.
    dtype : type or "bfloat16"
        Of the vectors.
    tensor_lengths : tuple of int
        Multiples of 64; () is one segment.
    vector_id : int

    Attributes
    ----------
    residuals : ndarray[size, n]
    """

    def __init__(
        self,
        options: Marsit,
        topology: Topology | None,
        size: int,
        n: int,
        dtype: Any = np.float32,
        tensor_lengths: tuple[int, ...] = (),
        vector_id: int = 0,
    ) -> None:
        self.options, self.topology, self.size, self.n, self.dtype = options, topology, size, n, dtype
        self.vector_id, self.winners = vector_id, options.winners
        self.compute = np.float64 if dtype == np.float64 else np.float32
        self.residuals = np.zeros((size, n), self.compute)
        self.lengths = np.array(tensor_lengths or [n])
        self.gamma = GAMMA if options.gamma == "auto" else options.gamma
        self.averages: NDArray[np.float64] | None = None
        self.t = 0

    def step(self, updates: Vectors) -> Vectors:
        """Take one step: row m is rank m's vector; returns what every rank gets."""
        u = updates.astype(self.compute)
        every = self.options.full_precision_every
        if every is not None and self.t % every == 0:
            assert self.topology is not None
            result = dense(self.topology, u + self.residuals, "mean")
            self.residuals[:] = 0
            self.follow(u)
        else:
            result = self.one_bit(u)
        self.t += 1
        return rounded(result, self.dtype)

    def state(self, rank: int) -> dict[str, Vectors]:
        """Return the residual of one rank, by its name in `state_dict`."""
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
        if self.winners is None:
            votes = unpack_bits(self.merged(packed), self.n)[None]
        else:
            stream = Stream(self.options.seed, self.vector_id, "selection")
            positive = np.array([unpack_bits(row, self.n) for row in packed])
            votes = votes_of(positive, winners(self.n, self.size, self.winners, stream, self.t))
        return np.where(votes.all(axis=0), s, np.where(votes.any(axis=0), self.compute(0), -s))

    def merged(self, bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """What the ranks' packed signs become; `bits` is overwritten."""
        stream = Stream(self.options.seed, self.vector_id, "merge")
        if self.topology is None:
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
        return np.repeat(s, self.lengths), np.repeat(s * self.compute(self.options.clip), self.lengths)

    def follow(self, u: Vectors) -> None:
        """Take in the mean of |u|."""
        totals = np.array([sum(self.magnitudes_of(row, segment) for row in u) for segment in range(self.lengths.size)])
        means = totals / (self.lengths * self.size)
        past = self.averages
        self.averages = means if past is None else AVERAGE * past + (1 - AVERAGE) * means

    def magnitudes_of(self, u: Vectors, segment: int) -> float:
        total = 0.0
        for start, stop in self.blocks(segment):
            total += float(magnitudes(u[start:stop])[0])
        return total

    def blocks(self, segment: int) -> Iterator[tuple[int, int]]:
        """Blocks are counted from the vector's start and end where a segment does."""
        start, end = int(self.lengths[:segment].sum()), int(self.lengths[: segment + 1].sum())
        while start < end:
            stop = min(end, start - start % BLOCK + BLOCK)
            yield start, stop
            start = stop


def merge(held: NDArray[np.uint64], incoming: NDArray[np.uint64], n: int, weights: tuple[int, int], draw: Draw) -> None:
    held_weight, incoming_weight = weights
    Sign().merge(
        held.view(np.uint8),
        incoming.view(np.uint8),
        n,
        held_weight=held_weight,
        incoming_weight=incoming_weight,
        draw=draw,
    )
