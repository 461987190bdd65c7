"""Few elements of a vector: picked out, put back, drawn."""

from __future__ import annotations

import numpy as np
from numba import float64, int64, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold, lane
from mpicomp.kernels.cpu.philox import LOW, draw, load_keys
from mpicomp.kernels.cpu.simd import LANES, load, splat, store

STRETCH = 4096  # elements, whole words of them, that stay in the caches from their clearing to their scattering

# Places of elements -------------------------------------------------------------------------------------------------


@kernel
def expand(indices, chunk, keep, start, stop, places):
    """Turn places within chunks into places in the vector. Places outside, after damage, move to the nearest inside.

    indices : uint32[k], `keep` of each chunk. start, stop : elements of the vector that the chunks divide.
    places : int64[k], overwritten.
    """
    base, left = int64(start), keep
    for j in range(indices.size):
        if left == 0:
            base += chunk
            left = keep
        left -= 1
        places[j] = min(base + min(int64(indices[j]), chunk - 1), stop - 1)


@kernel
def draw_strata(schedule, first, step, source, chunk, start, stop, places):
    """Draw one place of each chunk, each with the same probability up to chunk 2^-32.

    Chunk j of those from `first` on takes 32-bit word j mod 16 of draw (j mod 512) div 16 of group j div 512; its place
    is the word times the chunk's length, div 2^32.

    schedule : uint64[56], the stream's. step, source : uint64 counter words. start, stop : elements of the vector that
    the chunks divide. places : int64[chunks], overwritten.
    """
    keys = load_keys(schedule)
    for block in range(first // 16, (first + places.size + 15) // 16):
        low, high = draw(keys, uint64(block // 32), uint64(block % 32), step, source)
        for e in range(16):
            j = 16 * block + e - first
            if 0 <= j < places.size:
                word = lane(low, high, e // 2)
                uniform = word >> uint64(32) if e % 2 else word & LOW
                base = start + j * chunk
                length = min(chunk, stop - base)
                places[j] = base + int64((uniform * uint64(length)) >> uint64(32))


# A vector and its residual ------------------------------------------------------------------------------------------


@kernel
def finite_sum(x, residual, left):
    """Return whether x + residual, float32[n] or float64[n], has neither NaN nor infinity.

    left : like x, overwritten with the sum; or None.
    """
    nothing = splat(x.dtype.type(0))
    check = nothing
    whole = x.size // LANES * LANES
    for i in range(0, whole, LANES):
        sums = load(x, i) + load(residual, i)
        check = check + sums * nothing
        if left is not None:
            store(left, i, sums)
    total = fold(check)
    for i in range(whole, x.size):
        one = x[i] + residual[i]
        total += one * x.dtype.type(0)
        if left is not None:
            left[i] = one
    return total == 0


@kernel
def pick(x, residual, places, past, values, kept):
    """Compute values = x + residual at these places.

    past : scalar like x, or None. kept : like x, [k], overwritten with past * residual; None where `past` is.
    """
    for j in range(places.size):
        p = places[j]
        values[j] = x[p] + residual[p]
        if past is not None:
            kept[j] = past * residual[p]


@kernel
def remember(x, residual, past, part, start, places, kept, out):
    """Compute out = past * residual + part * (x + residual), but `kept` at these places.

    x, residual, out : parts of the vectors that begin at element `start`; out is overwritten. x None: the sum is in out
    already. past, part : scalars like out; None and None: 0, 1.
    places : int64[k], of the whole vectors. kept : as `pick` leaves it; None: zeros.
    """
    if x is None:
        pass
    elif past is None:
        for i in range(x.size):
            out[i] = x[i] + residual[i]
    else:
        for i in range(x.size):
            out[i] = past * residual[i] + part * (x[i] + residual[i])
    for j in range(places.size):
        if kept is None:
            out[places[j] - start] = out.dtype.type(0)
        else:
            out[places[j] - start] = kept[j]


@kernel
def put(values, places, out):
    """Assign out[places] = values, of any type."""
    for j in range(places.size):
        out[places[j]] = values[j]


# Payloads -----------------------------------------------------------------------------------------------------------


@kernel
def spread_chunks(values, indices, chunk, keep, out, adding):
    """Overwrite `out` with zeros and `values`, `keep` of each chunk, or with `adding` add the values to `out`.

    values : those that are not finite count as 0. indices : uint32[k], places within chunks; places outside move to the
    last element. adding : bool.
    """
    j = cleared = 0
    for start in range(0, out.size, chunk):
        stop = min(out.size, start + chunk)
        while cleared < stop and not adding:  # more than a short chunk at once
            out[cleared : cleared + STRETCH] = 0
            cleared += STRETCH
        k = keep if stop - start == chunk else (keep * (stop - start) + chunk - 1) // chunk
        for _ in range(k):
            if np.isfinite(values[j]):
                at = start + min(int64(indices[j]), stop - start - 1)
                out[at] = out[at] + values[j] if adding else values[j]
            j += 1


@kernel
def compress_masked(x, words, divisor, most, kept):
    """Copy the elements of x whose bit is 1, divided, in order, as far as there is room; return their number.

    x : float32[n] or float64[n]. words : uint64[at least ceil(n / 64)]. divisor, most : float64; quotients are held
    within -most .. most. kept : float32[room], overwritten as far as there are any.
    """
    found = 0
    for w in range((x.size + 63) // 64):
        word = words[w]
        left = x.size - 64 * w
        if left < 64:
            word &= (uint64(1) << uint64(left)) - uint64(1)
        while word and found < kept.size:
            v = float64(x[64 * w + int64(trailing_zeros(word))]) / divisor
            kept[found] = min(max(v, -most), most)
            found += 1
            word &= word - uint64(1)
    return found


@kernel
def spread_masked(words, kept, out):
    """Invert `compress_masked`: write zeros, and the next element where a bit is 1 and an element is left.

    kept : float32[k]; elements that are not finite become 0. out : float32[n] or float64[n], overwritten.
    """
    j = cleared = 0
    for w in range((out.size + 63) // 64):
        word, base = words[w], 64 * w
        if base == cleared:
            out[base : base + STRETCH] = 0
            cleared += STRETCH
        if out.size - base < 64:
            word &= (uint64(1) << uint64(out.size - base)) - uint64(1)
        while word and j < kept.size:
            if np.isfinite(kept[j]):
                out[base + int64(trailing_zeros(word))] = kept[j]
            j += 1
            word &= word - uint64(1)
