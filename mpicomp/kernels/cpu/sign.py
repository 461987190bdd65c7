"""Signs to bits and back: one bit per element, element i is bit i mod 64 of word i div 64.

Vectors are read in two halves at once: one stream of reads does not fill the memory bus of a core, two do.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int32, njit, uint16, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import count, fold, to_bits, to_mask, widen
from mpicomp.kernels.cpu.simd import LANES, absolute, fence, load, put, select, splat, store
from mpicomp.kernels.streams import BLOCK

BLOCK_WORDS = BLOCK // 64
ODD_LANES = np.uint64(0xAAAAAAAAAAAAAAAA)


@njit(nogil=True, inline="always")
def _threshold(zero, tiny, odd_positive, residual):
    """Return lanes to compare x with: 0, or in every other lane just above 0, so that the bits of zeros alternate."""
    if residual is not None:
        return splat(zero)
    if odd_positive:
        return select(to_mask(ODD_LANES, 0), splat(zero), splat(tiny))
    return select(to_mask(ODD_LANES, 0), splat(tiny), splat(zero))


@njit(nogil=True, inline="always")
def _encode_word(u, whole, residual, left, bits, j, threshold, step, limit, previous, magnitude, kept):
    """Store a word of signs and of the new residual; return the magnitudes, and lanes not clipped, so far."""
    word, before = uint64(0), uint64(0)
    if previous is not None:
        before = bits[j]
    for k in range(4):
        i, shift = 64 * j + LANES * k, uint64(LANES * k)
        x = load(u, i)
        if whole is not None:
            x = load(whole, i) - x
        size = absolute(x)
        if residual is not None:
            c = load(residual, i)
            if previous is not None:
                c = c - select(to_mask(before, shift), splat(previous), splat(-previous))
            x = x + c
            if previous is not None:
                # nothing bounds x, nor x less the coming result: 0 is added, or NaN where one of them may overflow
                most = absolute(x) + splat(step)
                size = size + (most - most)
        magnitude = magnitude + widen(size)
        positive = x >= threshold
        word |= to_bits(positive) << shift
        if residual is not None:
            if previous is None:
                x = x - select(positive, splat(step), splat(-step))
                # one comparison and one choice at a time: these are the processor's minimum and maximum
                bounded = select(x > splat(limit), splat(limit), x)
                bounded = select(bounded < splat(-limit), splat(-limit), bounded)
                kept = count(kept, bounded == x)
                x = bounded
            store(left, i, x)
    bits[j] = word
    return magnitude, kept


@njit(nogil=True, inline="always")
def _encode_tail(u, whole, residual, left, bits, start, tiny, odd_positive, step, limit, previous):
    """Encode the last, partial word, element by element; bits past the end are 0."""
    word, clipped, magnitude = uint64(0), 0, float64(0)
    j = start // 64
    for i in range(start, u.size):
        x = u[i]
        if whole is not None:
            x = whole[i] - x
        magnitude += abs(float64(x))
        if residual is None:
            zero_positive = (i % 2 == 1) == odd_positive
            positive = x >= tiny or (x == 0 and zero_positive)
        else:
            c = residual[i]
            if previous is not None:
                c = c - previous if (bits[j] >> uint64(i - start)) & uint64(1) else c + previous
            x = x + c
            positive = x >= 0
            if previous is not None:
                most = abs(x) + step
                magnitude += float64(most - most)
            else:
                x = x - step if positive else x + step
                if x > limit or x < -limit:
                    clipped += 1
                    x = limit if x > limit else -limit
            left[i] = x
        word |= uint64(positive) << uint64(i - start)
    bits[j] = word
    return magnitude, clipped


@kernel
def encode(u, whole, residual, left, bits, step, limit, previous, odd_positive, zero, tiny, sums):
    """Add the residual, pack signs, and write the new residual, in one pass.

    Parameters
    ----------
    u : float32[n] or float64[n]
    whole : like u, or None
        The values are whole - u, and may be fewer than the residual, by less than a word: zeros follow them.
        None: they are `u`.
    residual, left : like u, or None
        `left` is overwritten by the new residual, and may be `residual`. None: the signs of `u` itself, zeros
        alternating, at odd indices (`odd_positive`) or at even ones positive.
    bits : uint64[ceil(n / 64)]
        Overwritten. With `previous`, holds the last result's bits on entry.
    step, limit : scalars like u
        Rule "own": left <- clip(w - step sgn(w), -limit, limit), w = u + residual.
    previous : scalar like u, or None
        Rule "paper", lazily: w = u + (residual - previous * last result), left <- w.
    zero, tiny : scalars like u
        0 and the smallest positive number.
    sums : float64[ceil(n / 4096)]
        Overwritten: sum of |u| per block; not finite where `u` is not, or with `previous` where |w| + step is not.

    Returns
    -------
    int
        How many elements were clipped.
    """
    threshold = _threshold(zero, tiny, odd_positive, residual)
    nothing = widen(splat(zero))
    words = u.size // 64
    half = words // BLOCK_WORDS // 2
    clips = residual is not None and previous is None
    padded = False
    if whole is not None:
        padded = residual.size > u.size
    clipped = 64 * (words + padded) if clips else 0
    none = splat(int32(0))
    for b in range(half):
        first, second, kept = nothing, nothing, none
        for j in range(BLOCK_WORDS * b, BLOCK_WORDS * (b + 1)):
            far = j + BLOCK_WORDS * half
            first, kept = _encode_word(u, whole, residual, left, bits, j, threshold, step, limit, previous, first, kept)
            second, kept = _encode_word(
                u, whole, residual, left, bits, far, threshold, step, limit, previous, second, kept
            )
        sums[b], sums[b + half] = fold(first), fold(second)
        clipped -= fold(kept)
    for b in range(2 * half, sums.size):
        total, kept = nothing, none
        for j in range(BLOCK_WORDS * b, min(BLOCK_WORDS * (b + 1), words)):
            total, kept = _encode_word(u, whole, residual, left, bits, j, threshold, step, limit, previous, total, kept)
        if whole is not None:  # noqa: SIM102 - a condition of its own, by which Numba leaves the branch out
            if padded and b == sums.size - 1:
                last, start = np.zeros(64, u.dtype), 64 * words
                for i in range(u.size - start):
                    last[i] = whole[start + i] - u[start + i]
                own, to, word = residual[start:], left[start:], bits[words:]
                total, kept = _encode_word(last, None, own, to, word, 0, threshold, step, limit, previous, total, kept)
        sums[b] = fold(total)
        clipped -= fold(kept)
    if words < bits.size and not padded:
        magnitude, over_tail = _encode_tail(
            u, whole, residual, left, bits, 64 * words, tiny, odd_positive, step, limit, previous
        )
        sums[sums.size - 1] = magnitude + (sums[sums.size - 1] if words % BLOCK_WORDS else float64(0))
        clipped += over_tail
    return clipped


@njit(nogil=True, inline="always")
def _pack_word(x, j, threshold, nothing, check):
    word = uint64(0)
    for k in range(4):
        v = load(x, 64 * j + LANES * k)
        check = check + v * nothing
        word |= to_bits(v >= threshold) << uint64(LANES * k)
    return word, check


@kernel
def pack(x, bits, odd_positive, zero, tiny):
    """Pack the signs of x, zeros alternating as in `encode`; return whether all of x is finite.

    x : float32[n] or float64[n]; bits : uint64[ceil(n / 64)], overwritten.
    """
    threshold = _threshold(zero, tiny, odd_positive, None)
    nothing = splat(zero)
    check, check_far = nothing, nothing  # x * 0 is NaN for NaN and infinity
    words = x.size // 64
    half = words // 2
    for j in range(half):
        bits[j], check = _pack_word(x, j, threshold, nothing, check)
        bits[j + half], check_far = _pack_word(x, j + half, threshold, nothing, check_far)
    if words % 2:
        bits[words - 1], check = _pack_word(x, words - 1, threshold, nothing, check)
    total = fold(check + check_far)
    if words < bits.size:
        word = uint64(0)
        for i in range(64 * words, x.size):
            total += x[i] * zero
            positive = x[i] >= tiny or (x[i] == 0 and (i % 2 == 1) == odd_positive)
            word |= uint64(positive) << uint64(i - 64 * words)
        bits[words] = word
    return total == 0


@kernel
def unpack(bits, positive, negative, streaming, out):
    """Set out[i] = positive where bit i is 1, else negative.

    bits : uint64[ceil(n / 64)]. positive, negative : the two values as unsigned integers of out's width, so that one
    kernel writes every float type. streaming : store past the caches; `out` must then start at a multiple of 32 bytes.
    out : unsigned integers [n], overwritten.
    """
    p, m = splat(positive), splat(negative)
    words = out.size // 64
    for j in range(words):
        for k in range(4):
            put(out, 64 * j + LANES * k, select(to_mask(bits[j], LANES * k), p, m), streaming)
    if streaming:
        fence()
    for i in range(64 * words, out.size):
        out[i] = positive if (bits[words] >> uint64(i - 64 * words)) & uint64(1) else negative


@kernel
def all_finite(x):
    """Return whether x, float32[n] or float64[n], has neither NaN nor infinity."""
    nothing = splat(x.dtype.type(0))
    check, check_far = nothing, nothing
    half = x.size // (2 * LANES) * LANES
    for i in range(0, half, LANES):
        check = check + load(x, i) * nothing
        check_far = check_far + load(x, i + half) * nothing
    total = fold(check + check_far)
    for i in range(2 * half, x.size):
        total += x[i] * x.dtype.type(0)
    return total == 0


@kernel
def all_finite_16(bits, exponent):
    """Return whether 16-bit floats, uint16[n], have neither NaN nor infinity. exponent : uint16, mask of its bits."""
    found = uint16(0)
    for i in range(bits.size):
        found |= uint16(bits[i] & exponent == exponent)
    return found == 0


@kernel
def add_and_clear(u, residual, left, bits, previous, out, sums):
    """Prepare a full-precision round: out = u + residual, left = 0, and sums of |u| per block of 4096.

    residual, left, bits, previous : as in `encode`; `previous` None: nothing is pending. out : like u,
    overwritten; None without a residual: the sums alone. sums : float64[ceil(n / 4096)], overwritten.
    """
    zero = splat(u.dtype.type(0))
    for b in range(sums.size):
        total = widen(zero)
        end = min(u.size, (b + 1) * BLOCK)
        full = end // 64 * 64
        for i in range(b * BLOCK, full, LANES):
            x = load(u, i)
            total = total + widen(absolute(x))
            if residual is not None:
                c = load(residual, i)
                if previous is not None:
                    c = c - select(to_mask(bits[i // 64], i % 64), splat(previous), splat(-previous))
                x = x + c
                store(left, i, zero)
            if out is not None:
                store(out, i, x)
        rest = float64(0)
        for i in range(full, end):
            y = u[i]
            rest += abs(float64(y))
            if residual is not None:
                d = residual[i]
                if previous is not None:
                    d = d - previous if (bits[i // 64] >> uint64(i % 64)) & uint64(1) else d + previous
                y = y + d
                left[i] = 0
            if out is not None:
                out[i] = y
        sums[b] = fold(total) + rest


@kernel
def subtract_result(x, bits, step):
    """Compute x -= step where bit i is 1, else x += step. x : float32[n] or float64[n]; bits : uint64[ceil(n / 64)]."""
    plus, minus = splat(step), splat(-step)
    words = x.size // 64
    for j in range(words):
        for k in range(4):
            i = 64 * j + LANES * k
            store(x, i, load(x, i) - select(to_mask(bits[j], LANES * k), plus, minus))
    for i in range(64 * words, x.size):
        x[i] = x[i] - step if (bits[words] >> uint64(i - 64 * words)) & uint64(1) else x[i] + step
