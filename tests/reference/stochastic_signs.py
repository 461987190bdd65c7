"""SSDM's stochastic sign in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.philox import draw
from tests.reference.signs import block_sums, pack_bits


def sums_of_squares(x: NDArray[Any]) -> NDArray[np.float64]:
    """Per block of 4096, in float64."""
    wide = x.astype(np.float64)
    return block_sums(wide * wide, 16)


def uniforms(key: tuple[int, int], first_group: int, n: int, step: int, source: int) -> NDArray[np.uint32]:
    """32 bits per element: word e mod 16 of draw e div 16 of its group of 512."""
    groups = -(-n // 512)
    draws = [draw(key, first_group, groups, number, step, source).view(np.uint32) for number in range(32)]
    return np.stack([words.reshape(groups, 16) for words in draws], axis=1).reshape(-1)[:n]


def shared(key: tuple[int, int], n: int, step: int, rank: int, ranks: int) -> NDArray[np.uint32]:
    """Uniforms of correlated draws: those of rank 0, with a multiple of 2^32 / ranks added that differs by rank."""
    order = np.argsort(np.random.Philox(key=key[0] << 32 | key[1], counter=step).random_raw(ranks), kind="stable")
    total = uniforms(key, 0, n, step, 0).astype(np.uint64) + np.uint64(2**32 * int(order[rank]) // ranks)
    return (total % np.uint64(2**32)).astype(np.uint32)


def stochastic_bits(
    x: NDArray[Any], norm: float, key: tuple[int, int], first_group: int, step: int, source: int
) -> NDArray[np.uint64]:
    """Bit 1 with probability 1/2 + x / (2 norm); a norm of 0 gives fair coins."""
    scale = 2.0**31 / np.float64(norm) if norm > 0 else 0.0
    return pack_bits(uniforms(key, first_group, x.size, step, source) < 2.0**31 + x.astype(np.float64) * scale)
