"""Counts of positive signs in plain NumPy: bit planes, ties, Elias codes, and the methods that travel as counts.

The methods run with all their ranks in one process. Counts are exact, so neither a topology nor an order comes in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.kernels.streams import Stream
from tests.reference.one_process.base import Simulation, Vectors
from tests.reference.philox import draw
from tests.reference.signs import magnitude_from, pack_bits, signs, unpack_bits
from tests.reference.stochastic_signs import shared as shared_uniforms
from tests.reference.stochastic_signs import sums_of_squares, uniforms

Words = NDArray[np.uint64]


def width(weight: int) -> int:
    """Bits of a count."""
    return int(np.ceil(np.log2(weight + 1)))


def planes(counts: NDArray[Any], bits: int) -> Words:
    """Bit planes, the lowest first."""
    return np.concatenate([pack_bits((counts >> j & 1).astype(bool)) for j in range(bits)] or [np.zeros(0, np.uint64)])


def from_planes(words: Words, n: int, bits: int) -> NDArray[np.int64]:
    """The counts in bit planes."""
    rows = words.reshape(bits, -1)
    return sum((unpack_bits(row, n).astype(np.int64) << j for j, row in enumerate(rows)), np.zeros(n, np.int64))


def coins(stream: Stream, n: int, step: int) -> NDArray[np.bool_]:
    """Fair coins for every element, whatever the rank."""
    return unpack_bits(draw(stream.key(), 0, -(-n // 512), 0, step, 0), n)


# Elias codes as text, first bit first -------------------------------------------------------------------------------


def number(count: int, weight: int) -> int:
    """1, 2, 3, ... from the mode outwards."""
    offset = count - weight // 2
    return 1 if offset == 0 else 2 * offset if offset > 0 else 1 - 2 * offset


def gamma(value: int) -> str:
    below = f"{value:b}"[1:]
    return "0" * len(below) + "1" + below[::-1]


def delta(value: int) -> str:
    below = f"{value:b}"[1:]
    return gamma(len(below) + 1) + below[::-1]


def stream_of(codes: list[str]) -> NDArray[np.uint8]:
    """Codes as bytes, zeros up to a multiple of 64 bits."""
    bits = np.array(list("".join(codes)), "U1") == "1"
    packed = np.packbits(bits, bitorder="little")
    return np.pad(packed, (0, -packed.size % 8))


def sum_of_squares(x: Vectors, start: int) -> np.float64:
    """Of elements of one block, whichever they are."""
    found: np.float64 = sums_of_squares(x)[0]
    return found


def message_bytes(counts: NDArray[Any], weight: int) -> int:
    """The shortest message for these counts: header, and fixed width, gamma or delta codes."""
    fixed = 8 * -(-counts.size // 64) * width(weight)
    values, found = np.unique(counts, return_counts=True)
    numbers = [number(int(value), weight) for value in values]
    if weight == 1:
        return 8 + fixed
    coded = [sum(len(code(x)) * int(k) for x, k in zip(numbers, found, strict=True)) for code in (gamma, delta)]
    return 8 + min(fixed, *(8 * -(-bits // 64) for bits in coded))


# The methods --------------------------------------------------------------------------------------------------------


class VoteMethod(Simulation):
    """A method that travels as counts."""

    def scaled(self, positive: NDArray[np.bool_], factors: Vectors) -> Vectors:
        """(2 k - M) times each segment's factor."""
        counts = 2 * positive.sum(axis=0) - self.size
        return counts.astype(self.compute) * self.spread(factors.astype(self.compute))


class Majority(VoteMethod):
    """Majority vote."""

    def compute_step(self, g: Vectors) -> Vectors:
        counts = sum(signs(row, self.t % 2 == 0).astype(int) for row in g)
        up = (2 * counts > self.size) | ((2 * counts == self.size) & coins(self.stream("tie"), self.n, self.t))
        return np.where(up, 1.0, -1.0)


class EFSign(VoteMethod):
    """EF-signSGD; scales of buckets counted from each segment's start, or of whole segments."""

    def __init__(self, *where: Any) -> None:
        super().__init__(*where)
        if (bucket := self.options.bucket) is not None:
            cuts = [(a, b) for a, b in zip(self.starts, self.starts + self.lengths, strict=True)]
            starts = [start for a, b in cuts for start in range(a, b, bucket)]
            stops = [min(start + bucket, b) for a, b in cuts for start in range(a, b, bucket)]
            self.starts, self.lengths = np.array(starts), np.array(stops) - starts

    def compute_step(self, g: Vectors) -> Vectors:
        p = g + self.residuals
        norms = self.totals(p, magnitude_from)
        total = norms[0]
        for row in norms[1:]:
            total = total + row
        scales = (total / (self.lengths * self.size)).astype(self.compute)
        s = self.spread(scales)
        self.residuals = p - np.where(p >= 0, s, -s)
        return self.scaled(p >= 0, scales / self.compute(self.size))

    def state(self, rank: int) -> dict[str, Vectors]:
        return {"residual": self.residuals[rank]}


class StochasticSigns(VoteMethod):
    """SSDM; what it keeps is the momentum."""

    def compute_step(self, g: Vectors) -> Vectors:
        shared, momentum = self.options.scale == "norm", self.options.momentum
        beta, gain = self.compute(momentum), self.compute(1 - momentum)
        x = self.residuals = beta * self.residuals + gain * g if beta else g
        norms = np.sqrt(self.totals(x, sum_of_squares)).astype(self.compute).astype(np.float64)
        longest = norms.max(axis=0)
        positive = np.zeros((self.size, self.n), bool)
        for rank in range(self.size):
            norm = self.spread(longest if shared else norms[rank])
            scale = np.divide(2.0**31, norm, out=np.zeros(self.n), where=norm > 0)
            key = self.stream("stochastic sign").key()
            drawn = uniforms(key, 0, self.n, self.t, rank)
            if self.options.correlated:
                drawn = shared_uniforms(key, self.n, self.t, rank, self.size)
            positive[rank] = drawn < 2.0**31 + x[rank].astype(np.float64) * scale
        factors = longest.astype(self.compute) if shared else (longest > 0).astype(self.compute)
        return self.scaled(positive, factors / self.compute(self.size))

    def state(self, rank: int) -> dict[str, Vectors]:
        return {"momentum": self.residuals[rank]} if self.options.momentum else {}
