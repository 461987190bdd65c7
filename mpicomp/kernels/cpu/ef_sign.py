"""EF-signSGD's encoding pass, which also computes the residual of the last step from its scales."""

from __future__ import annotations

import numpy as np
from numba import float64, njit, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold, to_bits, widen
from mpicomp.kernels.cpu.sign import BLOCK_WORDS
from mpicomp.kernels.cpu.simd import LANES, absolute, fence, load, put, select, splat
from mpicomp.kernels.streams import BLOCK


@njit(nogil=True, inline="always")
def _encode_word(g, before, scale, nothing, after, streaming, bits, i, j, magnitude):
    """Encode elements i to i + 64, whose word is j."""
    word = uint64(0)
    for k in range(4):
        p = load(before, i + LANES * k)
        x = load(g, i + LANES * k) + (p - select(p >= nothing, scale, nothing - scale))
        magnitude = magnitude + widen(absolute(x))
        word |= to_bits(x >= nothing) << uint64(LANES * k)
        put(after, i + LANES * k, x, streaming)
    bits[j] = word
    return magnitude


@njit(nogil=True)
def _encode_some(g, before, scale, after, bits, first, start, stop, rest):
    """Encode a few elements of one word; the word's bits in front of them are set already."""
    zero = g.dtype.type(0)
    if start == stop:
        return rest
    j = (start - first) // 64
    word = bits[j] if start % 64 else uint64(0)
    for i in range(start, stop):
        p = before[i]
        x = g[i] + (p - scale if p >= zero else p + scale)
        rest += abs(float64(x))
        word |= uint64(x >= zero) << uint64(i % 64)
        after[i] = x
    bits[j] = word
    return rest


@njit(nogil=True)
def _encode_block(g, before, scale, streaming, after, bits, first, start, stop):
    """Encode the elements of one block; return the sum of magnitudes, of whole words by lanes, then of the rest."""
    zero = g.dtype.type(0)
    nothing, scales = splat(zero), splat(scale)
    head = min(stop, -(-start // 64) * 64)
    tail = max(head, stop // 64 * 64)
    rest = _encode_some(g, before, scale, after, bits, first, start, head, float64(0))
    total = widen(nothing)
    for i in range(head, tail, 64):
        total = _encode_word(g, before, scales, nothing, after, streaming, bits, i, (i - first) // 64, total)
    rest = _encode_some(g, before, scale, after, bits, first, tail, stop, rest)
    return fold(total) + rest


@kernel
def compensate_and_pack(g, before, last_scales, starts, stops, firsts, cut, low, high, streaming, after, bits, sums):
    """Compute after = g + e, with e = before - s sgn(before), and the signs of `after`, in one pass over a piece.

    Parameters
    ----------
    g, before : float32[n] or float64[n]
        sgn(0) = +1 here, -0 included.
    last_scales : like g [stretches]
        The scale s of each stretch. 0: `before` is e itself.
    starts, stops, firsts : int64[stretches]
        See `mpicomp.feedback.scale_groups.ScaleGroups`; elements between stretches are unchanged.
    cut : tuple of two integers
        The piece's elements; it begins and ends where blocks do, or with the vector.
    low, high : int
        The first stretch that reaches into the piece, and the one behind the last.
    streaming : bool
        Store past the caches; `after` must then start at a multiple of 32 bytes.
    after : like g
        Overwritten; not `before`.
    bits : uint64[ceil(len(cut) / 64)]
        Bits of the piece; overwritten, but for words of padding alone.
    sums : float64[blocks]
        The piece's are overwritten: sum of |after| per block; not finite where `after` is not.
    """
    first = cut[0]
    nothing = splat(g.dtype.type(0))
    for b in range(low, high):
        start, stop, scale = max(starts[b], first), min(stops[b], cut[1]), last_scales[b]
        block = firsts[b] + start // BLOCK - starts[b] // BLOCK
        if start % BLOCK:
            edge = min(stop, -(-start // BLOCK) * BLOCK)
            sums[block] = _encode_block(g, before, scale, streaming, after, bits, first, start, edge)
            start, block = edge, block + 1
        # two blocks at a time, one from each half: one stream of reads does not fill the memory bus of a core
        scales, half = splat(scale), (stop - start) // BLOCK // 2
        for k in range(half):
            one, other = widen(nothing), widen(nothing)
            for w in range(BLOCK_WORDS * k, BLOCK_WORDS * (k + 1)):
                i, j = start + 64 * w, (start - first) // 64 + w
                far, away = i + BLOCK * half, j + BLOCK_WORDS * half
                one = _encode_word(g, before, scales, nothing, after, streaming, bits, i, j, one)
                other = _encode_word(g, before, scales, nothing, after, streaming, bits, far, away, other)
            sums[block + k], sums[block + k + half] = fold(one), fold(other)
        start, block = start + 2 * half * BLOCK, block + 2 * half
        while start < stop:
            edge = min(stop, start + BLOCK)
            sums[block] = _encode_block(g, before, scale, streaming, after, bits, first, start, edge)
            start, block = edge, block + 1
    if streaming:
        fence()


@kernel
def settle(p, scales, starts, stops):
    """Compute p -= s sgn(p), s of each stretch.

    p : float32[n] or float64[n], overwritten. scales : like p [stretches].
    """
    for b in range(starts.size):
        scale = scales[b]
        for i in range(starts[b], stops[b]):
            p[i] = p[i] - scale if p[i] >= 0 else p[i] + scale


@kernel
def share(reports, elements, ranks, scales, factors):
    """Compute the scales that all ranks share, and the factors of the ranks' signs in the result.

    reports : float64[ranks, stretches], sums of magnitudes, which are added in rank order. elements :
    float64[stretches], over all ranks. ranks : scalar like the scales. scales, factors : float32 or float64
    [stretches], overwritten.

    Returns
    -------
    bool
        Whether the largest possible result of each stretch is finite.
    """
    finite = True
    for g in range(scales.size):
        total = reports[0, g]
        for rank in range(1, reports.shape[0]):
            total += reports[rank, g]
        scales[g] = total / elements[g]
        factors[g] = scales[g] / ranks
        finite = finite and np.isfinite(factors[g] * ranks)
    return finite
