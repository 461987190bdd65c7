"""Small integers to bit planes and back: plane j holds bit j of every code, 64 codes a word.

Code i of a plane is bit i mod 64 of word i div 64; the last word is padded with zeros. Codes of any width take exactly
that many bits each, and whole words of codes are added, compared and drawn from at once. The leading bits of float32
numbers are whole bytes, in columns, and bit planes.
"""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint32, uint64
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray
from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import to_bits, to_mask, to_uint32
from mpicomp.kernels.cpu.simd import LANES, load, select, splat, store

BLOCK = 4096  # words that stay in the caches
EXPONENT = np.uint32(0x7F800000)


def powers_of_two(bits: int, dtype: DTypeLike) -> AnyArray:
    """Return 1, 2, 4, ... of the codes' type, an argument of the kernels."""
    return (np.uint64(1) << np.arange(bits, dtype=np.uint64)).astype(dtype)


@kernel
def pack_planes(codes, powers, planes):
    """Pack codes of `planes.shape[0]` bits into planes.

    codes : uint8, uint16 or uint32[n]. powers : `powers_of_two` of the codes' type, at least one per plane.
    planes : uint64[bits, ceil(n / 64)], overwritten.
    """
    n = codes.size
    for w in range(n // 64):
        for j in range(planes.shape[0]):
            power, word = splat(powers[j]), uint64(0)
            for k in range(64 // LANES):
                word |= to_bits((load(codes, 64 * w + LANES * k) & power) == power) << uint64(LANES * k)
            planes[j, w] = word
    start = n - n % 64
    if start < n:
        for j in range(planes.shape[0]):
            word = uint64(0)
            for i in range(start, n):
                word |= uint64((codes[i] & powers[j]) == powers[j]) << uint64(i - start)
            planes[j, n // 64] = word


@kernel
def unpack_planes(planes, powers, codes):
    """Unpack codes, which are overwritten: the inverse of `pack_planes`. Bits past the end are ignored."""
    n = codes.size
    nothing = splat(powers[0]) ^ splat(powers[0])
    for w in range(n // 64):
        for k in range(64 // LANES):
            found = nothing
            for j in range(planes.shape[0]):
                found = found | select(to_mask(planes[j, w], LANES * k), splat(powers[j]), nothing)
            store(codes, 64 * w + LANES * k, found)
    start = n - n % 64
    for i in range(start, n):
        code = uint64(0)
        for j in range(planes.shape[0]):
            code |= ((planes[j, n // 64] >> uint64(i - start)) & uint64(1)) << uint64(j)
        codes[i] = code


# Bytes of float32 numbers ---------------------------------------------------------------------------------------------


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
