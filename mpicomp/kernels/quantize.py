"""Stochastic quantization to 2 s + 1 levels: 32 random bits an element.

The code of a level is the level itself, below zero the level plus a number `negative` that is no less than all levels.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int32, njit, uint64

from mpicomp.kernels.random import draw, load_keys
from mpicomp.kernels.simd import store

TILE = 4096
TWO_32 = np.float64(4294967296.0)


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
    """Code of each element: level l or l + 1, at random, so that the mean is levels |x| / scale.

    schedule, step, source : as in `mpicomp.kernels.random.draw_words`. first : index of x[0], a multiple of 16.
    x : float32[n] or float64[n]. bucket : elements that share a scale, counted from x[0]. scales : float32 of each.
    levels : s. negative : s or more. work : uint64[TILE / 2], overwritten.
    codes : uint8[n], overwritten.
    """
    keys = load_keys(schedule)
    uniform = work.view(np.uint32)
    for start in range(0, x.size, TILE):
        stop = min(x.size, start + TILE)
        _uniforms(keys, first + uint64(start), step, source, work[: 8 * ((stop - start + 15) // 16)])
        i = start
        while i < stop:
            b = i // bucket
            end = min(stop, (b + 1) * bucket)
            ratio = float64(levels) / float64(scales[b]) if scales[b] > 0 else float64(0)
            for e in range(i, end):
                place = abs(float64(x[e])) * ratio
                low = int32(place)
                up = float64(uniform[e - start]) < (place - float64(low)) * TWO_32
                level = min(low + int32(up), levels)
                codes[e] = level + (negative if x[e] < 0 and level > 0 else int32(0))
            i = end


@njit(nogil=True, cache=True)
def dequantize(codes, bucket, scales, levels, negative, out):  # type: ignore[no-untyped-def]
    """Values of codes, finite whatever the codes. codes : uint8[n]; out : float32[n] or float64[n], overwritten."""
    for b in range(scales.size):
        scale = float64(scales[b])
        unit = scale / float64(levels) if np.isfinite(scale) else float64(0)
        for i in range(b * bucket, min(out.size, (b + 1) * bucket)):
            code = int32(codes[i])
            below = code > negative
            value = float64(min(code - negative if below else code, levels)) * unit
            out[i] = -value if below else value
