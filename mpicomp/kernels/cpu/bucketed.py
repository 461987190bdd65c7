"""Numbers of each bucket: norms and means, summed in float64 over blocks of 4096 elements from the bucket's start."""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int64, njit, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import bit_count, fold, from_bits, greatest, to_bits, to_integers, to_mask, widen
from mpicomp.kernels.cpu.simd import LANES, absolute, load, select, splat, store
from mpicomp.kernels.cpu.ssdm import FLOAT32_MAX, squares_of_block
from mpicomp.kernels.streams import BLOCK

L2, L1, LINF = 0, 1, 2  # which norm


@njit(nogil=True, inline="always")
def _sum(x, kind, start, end):
    """Return the sum of squares (L2) or magnitudes (L1) of at most a block."""
    if kind == L2:
        return squares_of_block(x, None, None, None, start, end)
    total = widen(splat(x.dtype.type(0)))
    whole = start + (end - start) // LANES * LANES
    for i in range(start, whole, LANES):
        total = total + widen(absolute(load(x, i)))
    rest = float64(0)
    for i in range(whole, end):
        rest += abs(float64(x[i]))
    return fold(total) + rest


@njit(nogil=True, inline="always")
def _add(values, residual, x, start, end):
    whole = start + (end - start) // LANES * LANES
    for i in range(start, whole, LANES):
        store(x, i, load(values, i) + load(residual, i))
    for i in range(whole, end):
        x[i] = values[i] + residual[i]


@njit(nogil=True, inline="always")
def _largest(x, start, end):
    """Return the largest magnitude by the order of floats' bits: NaN and infinity are above all numbers."""
    zero = x.dtype.type(0)
    top = to_integers(splat(zero))
    whole = start + (end - start) // LANES * LANES
    for i in range(start, whole, LANES):
        size = to_integers(absolute(load(x, i)))
        top = select(size > top, size, top)
    most = greatest(top)
    for i in range(whole, end):
        most = max(most, to_integers(abs(x[i])))
    return float64(from_bits(most, zero))


@njit(nogil=True, inline="always")
def of_bucket(x, start, end, kind):
    """Return the sum of squares (L2), of magnitudes (L1) or the largest magnitude (LINF) of x[start:end], float64."""
    if kind == LINF:
        return _largest(x, start, end)
    total = float64(0)
    for first in range(start, end, BLOCK):
        total += _sum(x, kind, first, min(end, first + BLOCK))
    return total


@njit(nogil=True, inline="always")
def as_float32(found):
    """Round to float32 once; numbers beyond it become its largest number, NaN 0."""
    bounded = min(max(found, -FLOAT32_MAX), FLOAT32_MAX)
    return float32(bounded) if found == found else float32(0)


@kernel
def norms(x, bucket, kind, found):
    """Compute the sum of squares (L2), the sum of magnitudes (L1) or the largest magnitude (LINF) of each bucket.

    x : float32[n] or float64[n]. bucket : elements of each, counted from x[0]; the last may be short.
    found : float64[ceil(n / bucket)], overwritten; NaN or infinity where one of those is.
    """
    for b in range(found.size):
        found[b] = of_bucket(x, b * bucket, min(x.size, (b + 1) * bucket), kind)


@kernel
def clipped_scales(x, bucket, clip, scales):
    """Compute the largest magnitude of each bucket, but at most `clip` times the root of its mean square.

    x, bucket : as in `norms`. clip : float64, or None for no limit. scales : float32[ceil(n / bucket)], overwritten;
    infinity where the bucket has NaN or infinity, and the largest number where the scale is beyond float32.
    """
    for b in range(scales.size):
        start, end = b * bucket, min(x.size, (b + 1) * bucket)
        found = _largest(x, start, end)
        finite = np.isfinite(found)
        if clip is not None:
            found = min(found, clip * (np.sqrt(of_bucket(x, start, end, L2)) / np.sqrt(float64(end - start))))
        scales[b] = as_float32(found) if finite else np.inf


@njit(nogil=True, inline="always")
def _sides(x, start, stop):
    """Return the sums of a block's elements that are 0 or more and of the others, and the number of the former."""
    zero = x.dtype.type(0)
    nothing = splat(zero)
    total_up, total_down, count = widen(nothing), widen(nothing), 0
    whole = start + (stop - start) // LANES * LANES
    for i in range(start, whole, LANES):
        v = load(x, i)
        positive = v >= nothing
        total_up = total_up + widen(select(positive, v, nothing))
        total_down = total_down + widen(select(positive, nothing, v))
        count += int64(bit_count(to_bits(positive)))
    rest_up, rest_down = float64(0), float64(0)
    for i in range(whole, stop):
        if x[i] >= zero:
            rest_up += float64(x[i])
            count += 1
        else:
            rest_down += float64(x[i])
    return fold(total_up) + rest_up, fold(total_down) + rest_down, count


@kernel
def side_sums(x, bucket, above, below, n_above):
    """Compute each bucket's sums of the elements that are 0 or more and of the others, and the number of the former.

    x : float32[n] or float64[n]. above, below : float64[ceil(n / bucket)]; n_above : int64 likewise; overwritten.
    """
    for b in range(above.size):
        end = min(x.size, (b + 1) * bucket)
        up, down, count = float64(0), float64(0), 0
        for start in range(b * bucket, end, BLOCK):
            of_block = _sides(x, start, min(end, start + BLOCK))
            up, down, count = up + of_block[0], down + of_block[1], count + of_block[2]
        above[b], below[b], n_above[b] = up, down, count


@kernel
def spread(bits, numbers, bucket, out, adding):
    """Set out[i] to its bucket's upper number where bit i is 1, else to its lower, or with `adding` add that.

    bits : uint64[ceil(n / 64)]. numbers : float32[2, ceil(n / bucket)], the upper ones first; or [1, ...], where a
    lower number is minus the upper. Numbers that are not finite count as 0. out : float32[n] or float64[n]. adding :
    bool.
    """
    for b in range(numbers.shape[1]):
        i, end = b * bucket, min(out.size, (b + 1) * bucket)
        high = out.dtype.type(numbers[0, b] if np.isfinite(numbers[0, b]) else 0)
        if numbers.shape[0] == 1:
            low = high if high == 0 else -high
        else:
            low = out.dtype.type(numbers[1, b] if np.isfinite(numbers[1, b]) else 0)
        p, m = splat(high), splat(low)
        while i < end:
            word = bits[i // 64]
            if i % 64 or i + 64 > end:
                value = high if (word >> uint64(i % 64)) & uint64(1) else low
                out[i] = out[i] + value if adding else value
                i += 1
            else:
                for k in range(64 // LANES):
                    chosen = select(to_mask(word, LANES * k), p, m)
                    store(out, i + LANES * k, load(out, i + LANES * k) + chosen if adding else chosen)
                i += 64


@njit(nogil=True, inline="always")
def _pack_and_subtract(x, bits, start, end, high, low):
    """Set bit i = (x[i] >= 0), and subtract from x[i] `high` where that is 1, else `low`.

    Bits of a word before `start` stay; those behind `end` become 0. Returns 0 if all of x was finite.
    """
    zero = x.dtype.type(0)
    nothing, rest = splat(zero), zero
    strange = nothing  # v - v is 0 for finite numbers alone
    p, m = splat(high), splat(low)
    i = start
    while i < end:
        word = uint64(0)
        if i % 64 or i + 64 > end:
            v = x[i]
            rest += v - v
            if i % 64:
                word = bits[i // 64]
            bits[i // 64] = word | uint64(v >= zero) << uint64(i % 64)
            x[i] = v - (high if v >= zero else low)
            i += 1
        else:
            for k in range(64 // LANES):
                vector = load(x, i + LANES * k)
                strange = strange + (vector - vector)
                positive = vector >= nothing
                word |= to_bits(positive) << uint64(LANES * k)
                store(x, i + LANES * k, vector - select(positive, p, m))
            bits[i // 64] = word
            i += 64
    return fold(strange) + rest


@kernel
def keep_signs(values, residual, left, bits, scales, bucket, kind):
    """Pack signs of p = values + residual, compute a scale for each bucket, and left = p - scale sgn(p).

    values, residual, left : float32[n] or float64[n]. bits : uint64[ceil(n / 64)].
    scales : float32[1, ceil(n / bucket)]. kind : L2 or L1, the norm from which the scale is computed.
    Left, bits and scales are overwritten.

    Returns
    -------
    bool
        Whether all of p is finite.
    """
    strange = float64(0)
    for b in range(scales.shape[1]):
        first, end = b * bucket, min(left.size, (b + 1) * bucket)
        total = float64(0)
        for start in range(first, end, BLOCK):
            stop = min(end, start + BLOCK)
            _add(values, residual, left, start, stop)
            total += _sum(left, kind, start, stop)
        length = float64(end - first)
        scales[0, b] = as_float32(np.sqrt(total) / np.sqrt(length) if kind == L2 else total / length)
        high = left.dtype.type(scales[0, b])
        strange += _pack_and_subtract(left, bits, first, end, high, high if high == 0 else -high)
    return strange == 0


@kernel
def keep_sides(values, residual, left, bits, means, bucket):
    """Do the same as `keep_signs` with the mean of each side.

    means : float32[2, ceil(n / bucket)], the upper sides' first.
    """
    strange = float64(0)
    for b in range(means.shape[1]):
        first, end = b * bucket, min(left.size, (b + 1) * bucket)
        up, down, count = float64(0), float64(0), 0
        for start in range(first, end, BLOCK):
            stop = min(end, start + BLOCK)
            _add(values, residual, left, start, stop)
            of_block = _sides(left, start, stop)
            up, down, count = up + of_block[0], down + of_block[1], count + of_block[2]
        means[0, b] = as_float32(up / max(count, 1))
        means[1, b] = as_float32(down / max(end - first - count, 1))
        high, low = left.dtype.type(means[0, b]), left.dtype.type(means[1, b])
        strange += _pack_and_subtract(left, bits, first, end, high, low)
    return strange == 0
