"""Stochastic quantization to 2 s + 1 levels: 32 random bits an element.

The code of a level is the level itself, below zero the level plus a number `negative` that is no less than all levels.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int32, njit, uint32, uint64

from mpicomp.kernels.cpu.lanes import narrow, to_float64, to_uint8, to_uint32, widen
from mpicomp.kernels.cpu.philox import draw, load_keys
from mpicomp.kernels.cpu.simd import LANES, absolute, load, select, splat, store

TILE = 4096
ONE_OF_2_32 = np.float64(2.0**-32)


@njit(nogil=True)
def _uniforms(keys, first, step, source, words):  # type: ignore[no-untyped-def]
    """32 bits for each element from `first`, a multiple of 16, on; words : uint64[8 k], two elements each."""
    for turn in range(words.size // 8):
        element = first + uint64(16 * turn)
        low, high = draw(keys, element // uint64(512), element % uint64(512) // uint64(16), step, source)
        store(words, 8 * turn, low)
        store(words, 8 * turn + 4, high)


@njit(nogil=True, cache=True)
def quantize(schedule, first, step, source, x, bucket, scales, levels, negative, work, codes):  # type: ignore[no-untyped-def]
    """Code of each element: level floor(min(levels |x| / scale, levels) + u), u uniform in [0, 1).

    schedule, step, source : as in `mpicomp.kernels.cpu.philox.draw_words`. first : index of x[0], a multiple of 16.
    x : float32[n] or float64[n]. bucket : elements that share a scale, counted from x[0]. scales : float32 of each.
    levels : s. negative : s or more. work : uint64[TILE / 2], overwritten.
    codes : uint8[n], overwritten.
    """
    keys = load_keys(schedule)
    uniform = work.view(np.uint32)
    limit = float64(levels)
    zero, most, minus, none = splat(x.dtype.type(0)), splat(limit), splat(uint32(negative)), splat(uint32(0))
    for start in range(0, x.size, TILE):
        stop = min(x.size, start + TILE)
        _uniforms(keys, first + uint64(start), step, source, work[: 8 * ((stop - start + 15) // 16)])
        i = start
        while i < stop:
            b = i // bucket
            end = min(stop, (b + 1) * bucket)
            ratio = float64(levels) / float64(scales[b]) if scales[b] > 0 else float64(0)
            ratios, units = splat(ratio), splat(ONE_OF_2_32)
            while i + LANES <= end:
                v = load(x, i)
                u = to_float64(load(uniform, i - start)) * units
                place = widen(absolute(v)) * ratios
                level = to_uint32(select(place > most, most, place) + u)
                below = select(zero > v, select(level > none, minus, none), none)
                store(codes, i, to_uint8(level + below))
                i += LANES
            while i < end:
                level = int32(min(abs(float64(x[i])) * ratio, limit) + float64(uniform[i - start]) * ONE_OF_2_32)
                codes[i] = level + (negative if x[i] < 0 and level > 0 else 0)
                i += 1


@njit(nogil=True, cache=True)
def dequantize(codes, bucket, scales, levels, negative, out):  # type: ignore[no-untyped-def]
    """Values of codes, finite whatever the codes. codes : uint8[n]; out : float32[n] or float64[n], overwritten."""
    most, minus, none = splat(uint32(levels)), splat(uint32(negative)), splat(uint32(0))
    for b in range(scales.size):
        scale = float64(scales[b])
        unit = scale / float64(levels) if np.isfinite(scale) else float64(0)
        up, down = splat(unit), splat(-unit)
        i, end = b * bucket, min(out.size, (b + 1) * bucket)
        while i + LANES <= end:
            code = to_uint32(load(codes, i))
            below = code > minus
            level = code - select(below, minus, none)
            level = select(level > most, most, level)
            store(out, i, narrow(to_float64(level) * select(below, down, up), out.dtype.type(0)))
            i += LANES
        while i < end:
            code = int32(codes[i])
            below = code > negative
            value = float64(min(code - negative if below else code, levels)) * unit
            out[i] = -value if below else value
            i += 1
