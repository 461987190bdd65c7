"""Numbers of each bucket: norms and means, summed in float64 over blocks of 4096 elements from the bucket's start."""

from __future__ import annotations

import numpy as np
from numba import float64, njit, uint64

from mpicomp.kernels.sign import BLOCK
from mpicomp.kernels.simd import LANES, absolute, fold, load, select, splat, store, to_mask, widen

L2, L1 = 0, 1  # which norm
FLOAT32_MAX = np.float64(np.finfo(np.float32).max)


@njit(nogil=True, inline="always")
def _squares(x, start, end):  # type: ignore[no-untyped-def]
    total = widen(splat(x.dtype.type(0)))
    i = start
    while i + LANES <= end:
        v = widen(load(x, i))
        total = total + v * v
        i += LANES
    rest = float64(0)
    while i < end:
        rest += float64(x[i]) * float64(x[i])
        i += 1
    return fold(total) + rest


@njit(nogil=True, inline="always")
def _magnitudes(x, start, end):  # type: ignore[no-untyped-def]
    total = widen(splat(x.dtype.type(0)))
    i = start
    while i + LANES <= end:
        total = total + widen(absolute(load(x, i)))
        i += LANES
    rest = float64(0)
    while i < end:
        rest += abs(float64(x[i]))
        i += 1
    return fold(total) + rest


@njit(nogil=True, cache=True)
def norms(x, bucket, kind, sums):  # type: ignore[no-untyped-def]
    """Sum of squares (L2) or of magnitudes (L1) of each bucket.

    x : float32[n] or float64[n]. bucket : elements of each, counted from x[0]; the last may be short.
    sums : float64[ceil(n / bucket)], overwritten.
    """
    for b in range(sums.size):
        end = min(x.size, (b + 1) * bucket)
        total = float64(0)
        for start in range(b * bucket, end, BLOCK):
            stop = min(end, start + BLOCK)
            total += _squares(x, start, stop) if kind == L2 else _magnitudes(x, start, stop)
        sums[b] = total


@njit(nogil=True, cache=True)
def largest(bits, mask, bucket, out):  # type: ignore[no-untyped-def]
    """Largest magnitude of each bucket, by the order of floats' bits: NaN and infinity are above all numbers.

    bits : the values' bits, int32[n] or int64[n]. mask : all but the sign. out : like bits [ceil(n / bucket)],
    overwritten.
    """
    for b in range(out.size):
        part = bits[b * bucket : min(bits.size, (b + 1) * bucket)]
        most = mask ^ mask
        for i in range(part.size):
            magnitude = part[i] & mask
            most = magnitude if magnitude > most else most  # LLVM takes this by whole vectors, not so max()
        out[b] = most


@njit(nogil=True, cache=True)
def side_sums(x, bucket, above, below, n_above):  # type: ignore[no-untyped-def]
    """Sums of the elements that are 0 or more and of the others, and how many the former are, of each bucket.

    x : float32[n] or float64[n]. above, below : float64[ceil(n / bucket)]; n_above : int64 likewise; overwritten.
    """
    zero = x.dtype.type(0)
    for b in range(above.size):
        end = min(x.size, (b + 1) * bucket)
        up, down, count = float64(0), float64(0), 0
        for start in range(b * bucket, end, BLOCK):
            stop = min(end, start + BLOCK)
            nothing = splat(zero)
            total_up, total_down = widen(nothing), widen(nothing)
            i = start
            while i + LANES <= stop:
                v = load(x, i)
                positive = v >= nothing
                total_up = total_up + widen(select(positive, v, nothing))
                total_down = total_down + widen(select(positive, nothing, v))
                i += LANES
            rest_up, rest_down = float64(0), float64(0)
            while i < stop:
                if x[i] >= zero:
                    rest_up += float64(x[i])
                else:
                    rest_down += float64(x[i])
                i += 1
            up += fold(total_up) + rest_up
            down += fold(total_down) + rest_down
        for i in range(b * bucket, end):
            count += x[i] >= zero
        above[b], below[b], n_above[b] = up, down, count


@njit(nogil=True, cache=True)
def spread(bits, above, below, bucket, out):  # type: ignore[no-untyped-def]
    """out[i] = its bucket's `above` where bit i is 1, else its `below`.

    bits : uint64[ceil(n / 64)]. above, below : like out [ceil(n / bucket)]. out : float32[n] or float64[n],
    overwritten.
    """
    for b in range(above.size):
        i, end = b * bucket, min(out.size, (b + 1) * bucket)
        high, low = above[b], below[b]
        while i < end and i % 64:
            out[i] = high if (bits[i // 64] >> uint64(i % 64)) & uint64(1) else low
            i += 1
        p, m = splat(high), splat(low)
        while i + 64 <= end:
            word = bits[i // 64]
            for k in range(64 // LANES):
                store(out, i + LANES * k, select(to_mask(word, LANES * k), p, m))
            i += 64
        while i < end:
            out[i] = high if (bits[i // 64] >> uint64(i % 64)) & uint64(1) else low
            i += 1
