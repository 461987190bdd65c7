"""EF-signSGD's encoding pass: what the last step's scale left over is worked out on the way."""

from __future__ import annotations

from numba import float64, njit, uint64

from mpicomp.kernels.sign import BLOCK_WORDS
from mpicomp.kernels.simd import LANES, absolute, fence, fold, load, select, splat, store, stream, to_bits, widen


@njit(nogil=True, inline="always")
def _encode_word(g, before, scale, nothing, after, streaming, bits, j, magnitude):  # type: ignore[no-untyped-def]
    word = uint64(0)
    for k in range(4):
        i = 64 * j + LANES * k
        p = load(before, i)
        x = load(g, i) + (p - select(p >= nothing, scale, nothing - scale))
        magnitude = magnitude + widen(absolute(x))
        word |= to_bits(x >= nothing) << uint64(LANES * k)
        if streaming:
            stream(after, i, x)
        else:
            store(after, i, x)
    bits[j] = word
    return magnitude


@njit(nogil=True, cache=True)
def compensate_and_pack(g, before, last_scale, streaming, after, bits, sums):  # type: ignore[no-untyped-def]
    """after = g + e, with e = before - last_scale sgn(before), and the signs of `after`: one pass.

    Parameters
    ----------
    g, before : float32[n] or float64[n]
        sgn(0) = +1 here, -0 included.
    last_scale : scalar like g
        0: `before` is e itself.
    streaming : bool
        Store past the caches; `after` must then start at a multiple of 32 bytes.
    after : like g
        Overwritten; not `before`.
    bits : uint64[ceil(n / 64)]
        Overwritten.
    sums : float64[ceil(n / 4096)]
        Overwritten: sum of |after| per block; not finite where `after` is not.
    """
    zero = g.dtype.type(0)
    nothing, scale = splat(zero), splat(last_scale)
    words = g.size // 64
    half = words // BLOCK_WORDS // 2
    for b in range(half):
        first, second = widen(nothing), widen(nothing)
        for j in range(BLOCK_WORDS * b, BLOCK_WORDS * (b + 1)):
            far = j + BLOCK_WORDS * half
            first = _encode_word(g, before, scale, nothing, after, streaming, bits, j, first)
            second = _encode_word(g, before, scale, nothing, after, streaming, bits, far, second)
        sums[b], sums[b + half] = fold(first), fold(second)
    for b in range(2 * half, sums.size):
        total = widen(nothing)
        for j in range(BLOCK_WORDS * b, min(BLOCK_WORDS * (b + 1), words)):
            total = _encode_word(g, before, scale, nothing, after, streaming, bits, j, total)
        sums[b] = fold(total)
    if streaming:
        fence()
    if words < bits.size:
        word, rest = uint64(0), float64(0)
        for i in range(64 * words, g.size):
            p = before[i]
            x = g[i] + (p - last_scale if p >= zero else p + last_scale)
            rest += abs(float64(x))
            word |= uint64(x >= zero) << uint64(i - 64 * words)
            after[i] = x
        bits[words] = word
        sums[sums.size - 1] = rest + (sums[sums.size - 1] if words % BLOCK_WORDS else float64(0))


@njit(nogil=True, cache=True)
def settle(p, scale):  # type: ignore[no-untyped-def]
    """p -= scale sgn(p). p : float32[n] or float64[n], overwritten. scale : scalar like p."""
    for i in range(p.size):
        p[i] = p[i] - scale if p[i] >= 0 else p[i] + scale
