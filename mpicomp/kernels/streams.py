"""Random streams and probability tables, from which the kernels draw the words of one merge.

A stream is stateless: word = F(seed, vector id, purpose; step, rank, merge ordinal, element index). The first three
make the 64-bit key of Philox4x32-7, the others its counter (layout: `mpicomp.kernels.cpu.philox`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from collectives.annotations import Bytes, Words

ROUNDS = 7
GROUP = 512  # elements that share a counter
BLOCK = 4096  # elements whose sum is rounded together; counted from the start of a vector
TILE = 64
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Stream:
    """Names one family of random words.

    Parameters
    ----------
    seed : int
        Any integer of up to 64 bits, equal on all ranks.
    vector_id : int
        Number of the vector (bucket) among those under one seed.
    purpose : str
        Name of the use; streams of different purposes are unrelated.

    Examples
    --------
    >>> from mpicomp.kernels.streams import Stream
    >>> Stream(0, 0, "merge").key() == Stream(0, 0, "selection").key()
    False
    >>> Stream(0, 0, "merge").schedule().shape
    (56,)
    """

    seed: int
    vector_id: int
    purpose: str

    def key(self) -> tuple[int, int]:
        """Return two 32-bit key words."""
        text = f"{self.seed & (2**64 - 1)}/{self.vector_id}/{self.purpose}"
        digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"mpicomp").digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def schedule(self) -> Words:
        """Return uint64[56], not to be written to: both key words of each round, four times each."""
        return _schedule(self.seed, self.vector_id, self.purpose)


@lru_cache(maxsize=4096, typed=True)  # 1 and True are equal but have different keys
def _schedule(seed: int, vector_id: int, purpose: str) -> Words:
    return key_schedule(*Stream(seed, vector_id, purpose).key())


def key_schedule(key_0: int, key_1: int) -> Words:
    """Return uint64[56] for the kernels of `mpicomp.kernels.cpu.philox`, from two 32-bit key words."""
    rounds = [[(k + r * weyl) & _MASK32 for k, weyl in zip((key_0, key_1), _WEYL, strict=True)] for r in range(ROUNDS)]
    return np.repeat(np.array(rounds, dtype=np.uint64).reshape(-1), 4)


def source(rank: int, ordinal: int = 0) -> np.uint64:
    """Return the counter word of a rank and a merge.

    Raises
    ------
    ValueError
        The rank needs more than 20 bits, or the ordinal more than 12.
    """
    if not (0 <= rank < 2**20 and 0 <= ordinal < 2**12):
        raise ValueError(
            f"random streams reach to rank 2^20 and merge ordinal 2^12, not rank {rank}, ordinal {ordinal}"
        )
    return np.uint64(rank | ordinal << 20)


def shared_source(stream: Stream, step: int, rank: int, ranks: int) -> np.uint64:
    """Return the counter word that all ranks share, and above it the number that a rank adds to each 32-bit word.

    These numbers are the multiples of 2^32 / ranks, in an order that is drawn for each step. So the words of each rank
    are uniform, and those of all ranks spread evenly (Suresh, Sun, Ro, Yu: *Correlated quantization for distributed
    mean estimation and optimization*, ICML 2022).
    """
    return source(0) | np.uint64((_order(stream, step, ranks)[rank] << 32) // ranks << 32)


@lru_cache(maxsize=64)
def _order(stream: Stream, step: int, ranks: int) -> tuple[int, ...]:
    key_0, key_1 = stream.key()
    words = np.random.Philox(key=key_0 << 32 | key_1, counter=step).random_raw(ranks)
    return tuple(np.argsort(words, kind="stable").tolist())


@lru_cache(maxsize=4096)
def bernoulli_table(incoming_weight: int, held_weight: int) -> tuple[Bytes, Words]:
    """Return the alias table for four bits at a time, each 1 with probability incoming / (incoming + held).

    Returns
    -------
    table : uint8[64]
        The alias of each of the 16 cells, twice in a row, then the thresholds' high bytes likewise.
    rest : uint64[16]
        The thresholds' next 32 bits; empty for probability 1/2, where a cell is its own outcome.
    """
    p = Fraction(incoming_weight, incoming_weight + held_weight)
    full = 1 << 40  # one cell
    mass = [round(16 * full * p ** cell.bit_count() * (1 - p) ** (4 - cell.bit_count())) for cell in range(16)]
    mass[0 if p < Fraction(1, 2) else 15] += 16 * full - sum(mass)
    alias, threshold = list(range(16)), [0] * 16
    small = [cell for cell in range(16) if mass[cell] < full]
    large = [cell for cell in range(16) if mass[cell] > full]
    while small:
        cell, donor = small.pop(), large[-1]
        alias[cell], threshold[cell] = donor, mass[cell]
        mass[donor] -= full - mass[cell]
        if mass[donor] <= full:
            large.pop()
        if mass[donor] < full:
            small.append(donor)
    high = [t >> 32 for t in threshold]
    table = np.array([alias, alias, high, high], dtype=np.uint8).reshape(-1)
    rest = np.array([t & _MASK32 for t in threshold] if any(threshold) else [], dtype=np.uint64)
    return table, rest
