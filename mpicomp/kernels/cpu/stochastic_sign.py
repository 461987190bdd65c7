"""SSDM's stochastic sign: 32 random bits per element."""

from __future__ import annotations

import numpy as np
from numba import float32, float64, njit, uint64

from mpicomp.kernels.cpu.lanes import fold, lane, widen
from mpicomp.kernels.cpu.philox import LOW, draw, load_keys
from mpicomp.kernels.cpu.simd import load, splat
from mpicomp.kernels.streams import BLOCK

TWO_31 = np.float64(2147483648.0)


@njit(nogil=True, cache=True)
def sum_of_squares(x, sums):  # type: ignore[no-untyped-def]
    """Per block of 4096 elements, in float64.

    x : float32[n] or float64[n]. sums : float64[ceil(n / 4096)], overwritten.
    """
    for b in range(sums.size):
        end = min(x.size, (b + 1) * BLOCK)
        total = widen(splat(float32(0)))
        i = b * BLOCK
        while i + 16 <= end:
            v = widen(load(x, i))
            total = total + v * v
            i += 16
        rest = float64(0)
        while i < end:
            rest += float64(x[i]) * float64(x[i])
            i += 1
        sums[b] = fold(total) + rest


@njit(nogil=True, cache=True)
def stochastic_pack(schedule, first_group, step, source, x, norm, bits):  # type: ignore[no-untyped-def]
    """bit i = 1 with probability 1/2 + x[i] / (2 norm), to 2^-32.

    Element e of a group takes 32-bit word e mod 16 of draw e div 16. norm : 0 gives fair coins.
    bits : uint64[ceil(n / 64)], overwritten.
    """
    keys = load_keys(schedule)
    scale = TWO_31 / float64(norm) if norm > 0 else float64(0)
    bits[:] = uint64(0)
    for start in range(0, x.size, 16):
        low, high = draw(keys, first_group + uint64(start // 512), uint64(start % 512 // 16), step, source)
        packed = uint64(0)
        for e in range(min(16, x.size - start)):
            word = lane(low, high, e // 2)
            uniform = word >> uint64(32) if e % 2 else word & LOW
            packed |= uint64(float64(uniform) < TWO_31 + float64(x[start + e]) * scale) << uint64(e)
        bits[start // 64] |= packed << uint64(start % 64)
