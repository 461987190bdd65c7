"""Stochastic quantization to 2 s + 1 levels: 32 random bits an element.

The code of a level is the level itself, below zero the level plus a number `negative` that is no less than all levels.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int32, njit, uint32, uint64

from mpicomp.kernels.cpu.bucketed import L2, as_float32, of_bucket
from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import narrow, to_float64, to_uint8, to_uint32, widen
from mpicomp.kernels.cpu.philox import LOW, draw_two, load_keys_of_two
from mpicomp.kernels.cpu.planes import pack_planes, powers_of_two, unpack_planes
from mpicomp.kernels.cpu.simd import LANES, absolute, load, select, splat, store

TILE = 4096  # elements whose random words and codes stay in the caches
WORDS = TILE // 2 + TILE // 8  # of working memory
FIVE, LAST = np.uint64(5), np.uint64(31)  # a group has 2^5 draws
ONE_OF_2_32 = np.float64(2.0**-32)
POWERS = powers_of_two(8, np.uint8)


@njit(nogil=True)
def _uniforms(keys, first, step, source, count, words):
    """Draw 32 bits for each of `count` elements from `first`, a multiple of 16, on.

    keys : from `load_keys_of_two`. source : its upper half is added to each. words : uint64[TILE / 2], two elements
    each; overwritten up to the next 32 elements.
    """
    lower, shift = source & LOW, uint32(source >> uint64(32))
    for i in range(0, count, 32):
        draws = first // uint64(16) + uint64(i // 16)
        after = draws + uint64(1)
        one, other = draw_two(keys, draws >> FIVE, draws & LAST, after >> FIVE, after & LAST, step, lower)
        store(words, i // 2, one)
        store(words, i // 2 + 8, other)
    if shift:  # in a pass of its own: draws that are not shifted pay nothing
        uniform, shifts = words.view(np.uint32), splat(shift)
        for i in range(0, count, LANES):
            store(uniform, i, load(uniform, i) + shifts)


@njit(nogil=True, inline="always")
def _draw_codes(x, start, stop, bucket, scales, levels, negative, uniform, codes, base):
    """Write codes of x[start:stop] to codes[start - base:]. uniform : 32 random bits of each."""
    limit = float64(levels)
    zero, most, minus, none = splat(x.dtype.type(0)), splat(limit), splat(uint32(negative)), splat(uint32(0))
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
            level = to_uint32(select(most > place, place, most) + u)  # NaN becomes the highest
            below = select(zero > v, select(level > none, minus, none), none)
            store(codes, i - base, to_uint8(level + below))
            i += LANES
        while i < end:
            exact = abs(float64(x[i])) * ratio
            level = int32((exact if exact < limit else limit) + float64(uniform[i - start]) * ONE_OF_2_32)
            codes[i - base] = level + (negative if x[i] < 0 and level > 0 else 0)
            i += 1


@njit(nogil=True, inline="always")
def _write_values(codes, base, start, stop, bucket, scales, levels, negative, out, adding):
    """Write values of codes[start - base:] to out[start:stop], or with `adding` add them."""
    most, minus, none, like = splat(uint32(levels)), splat(uint32(negative)), splat(uint32(0)), out.dtype.type(0)
    i = start
    while i < stop:
        b = i // bucket
        end = min(stop, (b + 1) * bucket)
        scale = float64(scales[b])
        unit = scale / float64(levels) if np.isfinite(scale) else float64(0)
        up, down = splat(unit), splat(-unit)
        while i + LANES <= end:
            code = to_uint32(load(codes, i - base))
            below = code > minus
            level = code - select(below, minus, none)
            level = select(level > most, most, level)
            values = narrow(to_float64(level) * select(below, down, up), like)
            store(out, i, load(out, i) + values if adding else values)
            i += LANES
        while i < end:
            code = int32(codes[i - base])
            below = code > negative
            size = float64(min(code - negative if below else code, levels)) * unit
            value = out.dtype.type(-size if below else size)
            out[i] = out[i] + value if adding else value
            i += 1


@kernel
def quantize(schedule, first, step, source, x, bucket, scales, levels, negative, work, codes):
    """Compute the code of each element: level floor(min(levels |x| / scale, levels) + u), u uniform in [0, 1).

    schedule, step, source : as in `mpicomp.kernels.cpu.philox.draw_words`; the upper half of `source` is added to each
    32-bit word, modulo 2^32. first : index of x[0], a multiple of 16.
    x : float32[n] or float64[n]. bucket : elements that share a scale, counted from x[0]. scales : float32 of each.
    levels : s. negative : s or more. work : uint64[WORDS], overwritten. codes : uint8[n], overwritten.
    """
    keys = load_keys_of_two(schedule)
    uniform = work.view(np.uint32)
    for start in range(0, x.size, TILE):
        stop = min(x.size, start + TILE)
        _uniforms(keys, first + uint64(start), step, source, stop - start, work)
        _draw_codes(x, start, stop, bucket, scales, levels, negative, uniform, codes, 0)


@kernel
def encode(schedule, first, step, source, x, bucket, norm, scales, levels, negative, work, sent, planes):
    """Quantize to bit planes, with the buckets' norms as scales. Buckets that fit the caches are read from memory once.

    Arguments as in `quantize`, and norm : L2 or LINF of `mpicomp.kernels.cpu.bucketed`, and scales are overwritten;
    None: scales are given. sent : like x, overwritten with the values of the codes; or None. planes : uint64[bits,
    ceil(n / 64)], overwritten.

    Returns
    -------
    bool
        Whether all norms are finite; a norm beyond float32 becomes the largest number, NaN becomes 0.
    """
    keys = load_keys_of_two(schedule)
    uniform, codes = work.view(np.uint32), work[TILE // 2 :].view(np.uint8)
    scaled, finite = 0, True
    for start in range(0, x.size, TILE):
        stop = min(x.size, start + TILE)
        if norm is not None:
            while scaled * bucket < stop:
                found = of_bucket(x, scaled * bucket, min(x.size, (scaled + 1) * bucket), norm)
                found = np.sqrt(found) if norm == L2 else found
                finite &= np.isfinite(found)
                scales[scaled] = as_float32(found)
                scaled += 1
        _uniforms(keys, first + uint64(start), step, source, stop - start, work)
        _draw_codes(x, start, stop, bucket, scales, levels, negative, uniform, codes, start)
        pack_planes(codes[: stop - start], POWERS, planes[:, start // 64 : (stop + 63) // 64])
        if sent is not None:
            _write_values(codes, start, start, stop, bucket, scales, levels, negative, sent, False)
    return finite


@kernel
def dequantize(codes, bucket, scales, levels, negative, out, adding):
    """Write values of codes, or with `adding` add them; they are finite even for damaged codes.

    codes : uint8[n]. out : float32[n] or float64[n], overwritten. adding : bool.
    """
    _write_values(codes, 0, 0, out.size, bucket, scales, levels, negative, out, adding)


@kernel
def decode(planes, bucket, scales, levels, negative, work, out, adding):
    """Do the same as `dequantize` for codes in bit planes.

    planes : uint64[bits, ceil(n / 64)]. work : uint64[WORDS], overwritten.
    """
    codes = work.view(np.uint8)
    for start in range(0, out.size, TILE):
        stop = min(out.size, start + TILE)
        unpack_planes(planes[:, start // 64 : (stop + 63) // 64], POWERS, codes[: stop - start])
        _write_values(codes, start, start, stop, bucket, scales, levels, negative, out, adding)
