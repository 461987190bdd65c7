"""Small integers to bit planes and back: plane j holds bit j of every code, 64 codes a word.

Code i of a plane is bit i mod 64 of word i div 64; the last word is padded with zeros. Codes of any width take exactly
that many bits each, and whole words of codes are added, compared and drawn from at once.
"""

from __future__ import annotations

import numpy as np
from numba import uint64
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray
from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import to_bits, to_mask
from mpicomp.kernels.cpu.simd import LANES, load, select, splat, store


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
