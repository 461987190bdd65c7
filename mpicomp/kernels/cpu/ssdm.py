"""SSDM's two passes: the norm, with momentum or without, and stochastic signs, 32 random bits per element."""

from __future__ import annotations

import numpy as np
from numba import float32, float64, njit, uint32, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import as_lanes, fold, lane, to_bits, to_float64, widen
from mpicomp.kernels.cpu.philox import LOW, draw, draw_two, load_keys, load_keys_of_two
from mpicomp.kernels.cpu.simd import LANES, load, splat, store
from mpicomp.kernels.streams import BLOCK

TWO_31 = np.float64(2147483648.0)
FLOAT32_MAX = np.float64(np.finfo(np.float32).max)


@njit(nogil=True, inline="always")
def _move(g, momentum, beta, gain, i):
    """Return 16 elements of beta momentum + gain g, or of g."""
    x = load(g, i)
    if momentum is not None:
        x = splat(beta) * load(momentum, i) + splat(gain) * x
    return x


@njit(nogil=True, inline="always")
def _move_one(g, momentum, beta, gain, i):
    x = g[i]
    if momentum is not None:
        x = beta * momentum[i] + gain * x
    return x


@njit(nogil=True, inline="always")
def squares_of_block(g, momentum, beta, gain, start, end):
    """Return the sum of squares of at most a block of beta momentum + gain g, or of g, in float64."""
    total = widen(splat(g.dtype.type(0)))
    whole = start + (end - start) // LANES * LANES
    for i in range(start, whole, LANES):
        x = widen(_move(g, momentum, beta, gain, i))
        total = total + x * x
    rest = float64(0)
    for i in range(whole, end):
        y = float64(_move_one(g, momentum, beta, gain, i))
        rest += y * y
    return fold(total) + rest


@kernel
def squares(g, momentum, beta, gain, sums):
    """Compute the sum of squares of beta momentum + gain g per block of 4096, in float64.

    g : float32[n] or float64[n]. momentum : like g, or None: of g itself. beta, gain : scalars like g.
    sums : float64[ceil(n / 4096)], overwritten.
    """
    for b in range(sums.size):
        sums[b] = squares_of_block(g, momentum, beta, gain, b * BLOCK, min(g.size, (b + 1) * BLOCK))


@kernel
def norm(g, out):
    """Compute the two-norm of g, summed in float64 block by block and rounded once.

    A norm beyond float32 becomes its largest number. It is not finite where the sum of squares is not. g : float32[n]
    or float64[n]. out : float32[1], overwritten.
    """
    total = float64(0)
    for start in range(0, g.size, BLOCK):
        total += squares_of_block(g, None, None, None, start, min(g.size, start + BLOCK))
    root = np.sqrt(total)
    out[0] = float32(FLOAT32_MAX if FLOAT32_MAX < root < np.inf else root)


@kernel
def stochastic_signs(schedule, first, step, source, g, momentum, moved, beta, gain, norm, bits):
    """Compute moved = beta momentum + gain g; bit i is 1 with probability 1/2 + x[i] / (2 norm), to 2^-32, x = moved.

    schedule, step, source : as in `quantizer.quantize`; element e of a group of 512 takes 32-bit word
    e mod 16 of draw e div 16. first : index of g[0] in its vector, a multiple of 64. g : float32[n] or float64[n].
    momentum : like g, or None: x is g itself. moved : like momentum, overwritten. norm : float64; 0 gives fair coins.
    bits : uint64[ceil(n / 64)], overwritten.
    """
    keys, keys_of_two = load_keys(schedule), load_keys_of_two(schedule)
    shift, source = uint32(source >> uint64(32)), source & LOW
    shifts = splat(shift)
    scale = TWO_31 / norm if norm > 0 else float64(0)
    middle, scales = splat(TWO_31), splat(scale)
    words = g.size // 64
    for j in range(words):
        word = uint64(0)
        draws = (first + uint64(64 * j)) >> uint64(4)  # four draws a word, of one group
        for k in range(0, 4, 2):
            group, number = draws >> uint64(5), (draws & uint64(31)) + uint64(k)
            pair = draw_two(keys_of_two, group, number, group, number + uint64(1), step, source)
            for h in range(2):
                i = 64 * j + LANES * (k + h)
                x = _move(g, momentum, beta, gain, i)
                if momentum is not None:
                    store(moved, i, x)
                below = middle + widen(x) * scales > to_float64(as_lanes(pair[h]) + shifts)
                word |= to_bits(below) << uint64(LANES * (k + h))
        bits[j] = word
    if words < bits.size:
        word = uint64(0)
        for start in range(64 * words, g.size, LANES):
            element = first + uint64(start)
            low, high = draw(keys, element >> uint64(9), (element >> uint64(4)) & uint64(31), step, source)
            for i in range(start, min(start + LANES, g.size)):
                two = lane(low, high, (i - start) // 2)
                uniform = uint32((two >> uint64(32) if (i - start) % 2 else two & LOW) + uint64(shift))
                y = _move_one(g, momentum, beta, gain, i)
                if momentum is not None:
                    moved[i] = y
                word |= uint64(float64(uniform) < TWO_31 + float64(y) * scale) << uint64(i - 64 * words)
        bits[words] = word


@kernel
def round_norms(norms, largest, rounded):
    """Round norms to the type of computing; those beyond its largest number become that number.

    norms : float64[stretches], overwritten. largest : scalar of the type. rounded : the same numbers in the type,
    overwritten.
    """
    for g in range(norms.size):
        rounded[g] = min(norms[g], float64(largest)) if np.isfinite(norms[g]) else norms[g]
        norms[g] = rounded[g]


@kernel
def share_norms(reports, own, ranks, norms, factors):
    """Choose the norms of a step, and compute the factors of the ranks' signs in the result.

    reports : float64[ranks, stretches], norms. own : the rank whose norms are chosen; None: the largest norms. ranks :
    scalar like the factors. norms : float64[stretches], overwritten. factors : float32 or float64 [stretches],
    overwritten.

    Returns
    -------
    bool, bool
        Whether all reports are finite, and whether the largest possible result of each stretch is.
    """
    finite, representable = True, True
    for g in range(norms.size):
        longest = reports[0, g]
        finite = finite and np.isfinite(longest)
        for rank in range(1, reports.shape[0]):
            longest = max(longest, reports[rank, g])
            finite = finite and np.isfinite(reports[rank, g])
        if own is None:
            norms[g], factors[g] = longest, longest
        else:
            norms[g], factors[g] = reports[own, g], 1 if longest > 0 else 0
        factors[g] /= ranks
        representable = representable and np.isfinite(factors[g] * ranks)
    return finite, representable
