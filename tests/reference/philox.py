"""Philox4x32-7 and the words that merges draw, in plain NumPy, from the published algorithm and the documented layout.

Reference: Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFFFFFF
ROUNDS = 7

Words = NDArray[np.uint64]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int], rounds: int = ROUNDS) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words per counter; its members are Python integers or arrays of uint64, below 2^32."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 & MASK, (p0 >> 32) ^ x3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0, x1, x2, x3


def _counters(first: Words, number: int, step: int, source: int) -> tuple[Words, Words, Words, Words]:
    """The counters (f mod 2^32, number + 2^8 (f div 2^32), step, source), one for each f."""
    like = np.ones_like(first)
    return first & MASK, number + ((first >> 32) << 8), step * like, source * like


def draw(key: tuple[int, int], first_group: int, n_groups: int, number: int, step: int, source: int) -> Words:
    """Draw `number` of groups of 512 elements: uint64[8 n_groups]."""
    blocks = 4 * first_group + np.arange(4 * n_groups, dtype=np.uint64)
    x0, x1, x2, x3 = philox(_counters(blocks, number, step, source), key)
    low, high = (x0 | x1 << 32).reshape(-1, 4), (x2 | x3 << 32).reshape(-1, 4)
    return np.concatenate([low, high], axis=1).reshape(-1)


def mix_words(
    key: tuple[int, int],
    first_group: int,
    n_groups: int,
    step: int,
    source: int,
    table: NDArray[np.uint8],
    rest: NDArray[np.uint64],
) -> Words:
    """Words of `n_groups` groups, each bit 1 with the probability behind the alias table: uint64[8 n_groups]."""
    where = first_group, n_groups
    first = draw(key, *where, 0, step, source)
    if not rest.size:
        return first
    both = first.view(np.uint8)
    cells = np.stack([both & 15, both >> 4], axis=1).reshape(-1)  # in the order of the vector's elements
    coins = np.stack([draw(key, *where, number, step, source).view(np.uint8) for number in (1, 2)], axis=1).reshape(-1)
    alias, threshold = table[:16][cells], table[32:48][cells]
    outcome = np.where(coins > threshold, alias, cells)
    (ties,) = np.nonzero(coins == threshold)
    halves = 128 * first_group + ties.astype(np.uint64)
    more = philox(_counters(halves, 3, step, source), key)[0]
    outcome[ties] = np.where(more >= rest[cells[ties]], alias[ties], cells[ties])
    pairs = outcome.reshape(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4).view(np.uint64)


def merge(words: Words, incoming: Words, held: Words) -> Words:
    """The incoming bit where the word's is 1, else the held one."""
    return (incoming & words) | (held & ~words)
