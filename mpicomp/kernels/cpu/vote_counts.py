"""Counts as bit planes: added word by word, compared with half of all, and turned into values.

The layout is that of `mpicomp.kernels.cpu.planes`, with the planes one behind the other in a flat array, `words` words
each. Counts of more ranks have more planes behind the same first ones, so they are added in place.
"""

from __future__ import annotations

import numpy as np
from numba import float64, njit, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import to_byte_mask, to_floats, to_mask
from mpicomp.kernels.cpu.simd import (
    BYTES,
    LANES,
    WORDS,
    fence,
    load_words,
    put,
    select,
    splat,
    splat_byte,
    splat_word,
    store,
)

FEW_PLANES = 6  # for every count of so many planes, 2 count - weight fits a signed byte
EVERY_BIT = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit(nogil=True)
def _get(array, i, wide):
    """Word i, or with `wide` the four words from i on."""
    if wide is None:
        return array[i]
    return load_words(array, i)


@njit(nogil=True)
def _put(array, i, value, wide):
    if wide is None:
        array[i] = value
    else:
        store(array, i, value)


@njit(nogil=True)
def _every_bit(wide):
    if wide is None:
        return EVERY_BIT
    return splat_word(EVERY_BIT)


@njit(nogil=True)
def _add(incoming, incoming_planes, held, held_planes, planes, words, w, wide):
    """Ripple-carry addition of 64 (or 256) counts."""
    a, b = _get(incoming, w, wide), _get(held, w, wide)
    _put(held, w, a ^ b, wide)
    carry = a & b
    both, most = min(incoming_planes, held_planes), max(incoming_planes, held_planes)
    for j in range(1, both):
        at = j * words + w
        a, b = _get(incoming, at, wide), _get(held, at, wide)
        half = a ^ b
        _put(held, at, half ^ carry, wide)
        carry = (a & b) | (half & carry)
    for j in range(both, most):
        at = j * words + w
        a = _get(incoming, at, wide) if incoming_planes == most else _get(held, at, wide)
        _put(held, at, a ^ carry, wide)
        carry = a & carry
    if planes > most:
        _put(held, most * words + w, carry, wide)


@kernel
def add_counts(incoming, incoming_planes, held, held_planes, planes, words):
    """Add counts: held += incoming.

    incoming : uint64[incoming_planes * words]. held : uint64[planes * words], of which the first `held_planes` planes
    count; overwritten. planes : of the sum, one more than the larger of both at most; higher bits are lost.
    """
    whole = words - words % WORDS
    for w in range(0, whole, WORDS):
        _add(incoming, incoming_planes, held, held_planes, planes, words, w, True)
    for w in range(whole, words):
        _add(incoming, incoming_planes, held, held_planes, planes, words, w, None)


@njit(nogil=True)
def _decide(counts, planes, words, w, half, coins, bits, wide):
    """Compare from the highest plane down: counts above half of all, and counts equal to it so far."""
    equal = _every_bit(wide)
    above = equal ^ equal
    for j in range(planes - 1, -1, -1):
        plane = _get(counts, j * words + w, wide)
        if (half >> j) & 1:
            equal = equal & plane
        else:
            above = above | (equal & plane)
            equal = equal ^ (equal & plane)
    if coins is not None:
        above = above | (equal & _get(coins, w, wide))
    _put(bits, w, above, wide)


@kernel
def majority(counts, planes, words, half, coins, bits):
    """Set bit i where count i is above `half`. Where it equals `half`, bit i is the coin.

    counts : uint64[planes * words]. half : weight // 2. coins : uint64[words], or None, where a tie is impossible (odd
    weights): equality then gives 0. bits : uint64[words], overwritten; may be the first plane.
    """
    whole = words - words % WORDS
    for w in range(0, whole, WORDS):
        _decide(counts, planes, words, w, half, coins, bits, True)
    for w in range(whole, words):
        _decide(counts, planes, words, w, half, coins, bits, None)


@njit(nogil=True, inline="always")
def _few(counts, planes, words, at, k, powers, lowest, factor):
    """(2 count - weight) * factor of 32 elements, summed as signed bytes."""
    total, nothing = splat_byte(lowest), splat_byte(lowest) ^ splat_byte(lowest)
    for j in range(planes):
        mask = to_byte_mask(counts[j * words + at], BYTES * k)
        total = total + select(mask, splat_byte(powers[j]), nothing)
    return to_floats(total, factor) * splat_byte(factor)


@njit(nogil=True, inline="always")
def _many(counts, planes, words, at, k, powers, lowest, factor):
    """(2 count - weight) * factor of 16 elements, summed as floats, which is exact."""
    total, nothing = splat(lowest), splat(lowest - lowest)
    for j in range(planes):
        mask = to_mask(counts[j * words + at], LANES * k)
        total = total + select(mask, splat(powers[j]), nothing)
    return total * splat(factor)


@njit(nogil=True)
def _some(counts, planes, words, powers, lowest, factor, start, stop, out):
    """(2 count - weight) * factor of a few elements, one by one."""
    kind = out.dtype.type
    for i in range(start, stop):
        total = kind(lowest)
        for j in range(planes):
            if (counts[j * words + i // 64] >> uint64(i % 64)) & uint64(1):
                total += kind(powers[j])
        out[i] = total * factor


@njit(nogil=True, inline="always")
def _values(counts, planes, words, powers, lowest, factors, starts, stops, first, low, high, streaming, out, few):
    """Compute `few_values`, or with `few` None `many_values`."""
    end = 0
    for b in range(low, high):
        start, stop, factor = max(starts[b] - first, 0), min(stops[b] - first, out.size), factors[b]
        out[end:start] = 0
        head = min(stop, -(-start // 64) * 64)
        _some(counts, planes, words, powers, lowest, factor, start, head, out)
        for w in range(head // 64, stop // 64):
            if few is None:
                for k in range(64 // LANES):
                    put(out, 64 * w + LANES * k, _many(counts, planes, words, w, k, powers, lowest, factor), streaming)
            else:
                one = _few(counts, planes, words, w, 0, powers, lowest, factor)
                other = _few(counts, planes, words, w, 1, powers, lowest, factor)
                put(out, 64 * w, one, streaming)
                put(out, 64 * w + BYTES, other, streaming)
        _some(counts, planes, words, powers, lowest, factor, max(head, stop // 64 * 64), stop, out)
        end = stop
    out[end:] = 0
    if streaming:
        fence()


@kernel
def few_values(counts, planes, words, powers, lowest, factors, starts, stops, first, low, high, streaming, out):
    """Compute out[i] = (2 count - weight) * the factor of its stretch, and 0 between stretches.

    counts : uint64[planes * words], of no more than `FEW_PLANES` bits. powers : int8, 2, 4, 8, ..., one per plane.
    lowest : int8, -weight. factors : like out [stretches]. starts, stops : int64[stretches], of elements of the vector,
    in order; those from `low` on and before `high` reach into `out`, whose own first element is `first`. streaming :
    store past the caches; `out` must then start at a multiple of 32 bytes. out : float32[n] or float64[n], overwritten.
    """
    _values(counts, planes, words, powers, lowest, factors, starts, stops, first, low, high, streaming, out, True)


@kernel
def many_values(counts, planes, words, powers, lowest, factors, starts, stops, first, low, high, streaming, out):
    """Compute `few_values` for counts of any size; powers, lowest : of out's type."""
    _values(counts, planes, words, powers, lowest, factors, starts, stops, first, low, high, streaming, out, None)


@kernel
def segment_totals(sums, firsts, totals):
    """Add up blocks' sums, in index order; return whether all totals are finite.

    sums : float64[blocks]. firsts : int64[stretches], each one's first block. totals : float64[stretches],
    overwritten.
    """
    finite = True
    for b in range(firsts.size):
        total = float64(0)
        for block in range(firsts[b], firsts[b + 1] if b + 1 < firsts.size else sums.size):
            total += sums[block]
        totals[b] = total
        finite = finite and np.isfinite(total)
    return finite
