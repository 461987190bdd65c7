"""The leading bits of float32 numbers: whole bytes as columns, the rest as bit planes."""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint32

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import to_uint32
from mpicomp.kernels.cpu.simd import LANES, load, splat, store

BLOCK = 4096  # words that stay in the caches
EXPONENT = np.uint32(0x7F800000)


@kernel
def split_bytes(words, columns):
    """Write byte j, the highest first, of each word to column j.

    words : uint32[n]; columns : uint8[k, n], overwritten.
    """
    for j in range(columns.shape[0]):
        shift = uint32(24 - 8 * j)
        for i in range(words.size):
            columns[j, i] = uint8((words[i] >> shift) & uint32(255))


@njit(nogil=True, inline="always")
def _or_in(column, shift, words, fresh):
    """Compute words |= column << shift, or with `fresh` words = column << shift."""
    by = splat(uint32(shift))
    whole = words.size // LANES * LANES
    for i in range(0, whole, LANES):
        moved = to_uint32(load(column, i)) << by
        store(words, i, moved if fresh else load(words, i) | moved)
    for i in range(whole, words.size):
        moved_one = uint32(column[i]) << uint32(shift)
        words[i] = moved_one if fresh else words[i] | moved_one


@kernel
def join_bytes(columns, rest, shift, words):
    """Join columns of bytes into words: the inverse of `split_bytes`. Missing bytes, NaN and infinity become 0.

    columns : uint8[k, n], k 1 to 4. rest : uint8[n], ORed in `shift` bits from the lowest one; or None.
    words : uint32[n], overwritten.
    """
    for start in range(0, words.size, BLOCK):
        stop = min(words.size, start + BLOCK)
        some = words[start:stop]
        _or_in(columns[0, start:stop], 24, some, True)
        for j in range(1, columns.shape[0]):
            _or_in(columns[j, start:stop], 24 - 8 * j, some, False)
        if rest is not None:
            _or_in(rest[start:stop], shift, some, False)
        for i in range(some.size):
            some[i] = some[i] if (some[i] & EXPONENT) != EXPONENT else uint32(0)
