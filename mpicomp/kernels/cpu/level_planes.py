"""Codes of 2, 4, 8 and 16 levels in planes, one of signs and some of magnitudes, in whole words of 64 codes."""

from __future__ import annotations

from numba import float32, float64, njit, uint64

from mpicomp.kernels.cpu.lanes import bit_count, fold, to_bits, to_mask
from mpicomp.kernels.cpu.simd import LANES, absolute, load, prefetch, select, splat


@njit(nogil=True, inline="always")
def _limits(steps, sigma, planes):
    """Return the thresholds of a bucket in registers; those that its number of planes lacks are not used."""
    none = splat(float32(0))
    first, second, third, fourth, fifth, sixth, seventh = none, none, none, none, none, none, none
    if planes >= 1:
        first = splat(float32(steps[0] * sigma))
    if planes >= 2:
        second, third = splat(float32(steps[1] * sigma)), splat(float32(steps[2] * sigma))
    if planes >= 3:
        fourth, fifth = splat(float32(steps[3] * sigma)), splat(float32(steps[4] * sigma))
        sixth, seventh = splat(float32(steps[5] * sigma)), splat(float32(steps[6] * sigma))
    return first, second, third, fourth, fifth, sixth, seventh


@njit(nogil=True, inline="always")
def magnitudes_in_registers(levels, scale, planes):
    """Return the decoded magnitudes of a bucket in registers."""
    none = splat(scale * levels[0])
    second, third, fourth, fifth, sixth, seventh, eighth = none, none, none, none, none, none, none
    if planes >= 1:
        second = splat(scale * levels[1])
    if planes >= 2:
        third, fourth = splat(scale * levels[2]), splat(scale * levels[3])
    if planes >= 3:
        fifth, sixth = splat(scale * levels[4]), splat(scale * levels[5])
        seventh, eighth = splat(scale * levels[6]), splat(scale * levels[7])
    return none, second, third, fourth, fifth, sixth, seventh, eighth


@njit(nogil=True, inline="always")
def quotients(sizes, divisor):
    """Return magnitudes over a number of ranks."""
    first, second, third, fourth, fifth, sixth, seventh, eighth = sizes
    lower = first / divisor, second / divisor, third / divisor, fourth / divisor
    return *lower, fifth / divisor, sixth / divisor, seventh / divisor, eighth / divisor


@njit(nogil=True, inline="always")
def _find(size, planes, limits):
    """Return the bits of the level of each magnitude, the highest first."""
    none = size > size
    if planes == 1:
        return none, none, size > limits[0]
    if planes == 2:
        middle = size > limits[1]
        return none, middle, size > select(middle, limits[2], limits[0])
    if planes == 3:
        high = size > limits[3]
        middle = size > select(high, limits[5], limits[1])
        upper = select(middle, limits[6], limits[4])
        return high, middle, size > select(high, upper, select(middle, limits[2], limits[0]))
    return none, none, none


@njit(nogil=True, inline="always")
def _choose(high, middle, low, planes, sizes):
    """Return the magnitude with these bits."""
    found = sizes[0]
    if planes >= 1:
        found = select(low, sizes[1], found)
    if planes >= 2:
        found = select(middle, select(low, sizes[3], sizes[2]), found)
    if planes == 3:
        lower = select(low, sizes[5], sizes[4])
        found = select(high, select(middle, select(low, sizes[7], sizes[6]), lower), found)
    return found


@njit(nogil=True, inline="always")
def decode_planes(words, place, stride, planes, shift, sizes):
    """Return the values of 16 codes, whose first plane has its word at `place`."""
    sign = to_mask(words[place], shift)
    high, middle, low = sign, sign, sign
    if planes >= 1:
        low = to_mask(words[place + stride], shift)
    if planes >= 2:
        middle = to_mask(words[place + 2 * stride], shift)
    if planes >= 3:
        high = to_mask(words[place + 3 * stride], shift)
    size = _choose(high, middle, low, planes, sizes)
    return select(sign, splat(float32(0)) - size, size)


@njit(nogil=True, inline="always")
def encode_planes(v, at, padded, n, planes, tables, sigma, words, place, u, residual, ahead):
    """Write the codes of a bucket; returns sum v q and sum q^2. Loads a later bucket from memory."""
    steps, levels, squares = tables
    limits, sizes = _limits(steps, sigma, planes), magnitudes_in_registers(levels, float32(1), planes)
    stride, none = padded // 64, splat(float32(0))
    total, other = none, none
    energy, others = float64(0), n
    for j in range(stride):
        sign_word, high_word, middle_word, low_word = uint64(0), uint64(0), uint64(0), uint64(0)
        for k in range(0, 64, LANES):
            prefetch(u, ahead + 64 * j + k)
            prefetch(residual, ahead + 64 * j + k)
            x = load(v, at + 64 * j + k)
            size, shift = absolute(x), uint64(k)
            high, middle, low = _find(size, planes, limits)
            terms = size * _choose(high, middle, low, planes, sizes)
            if k & LANES:
                other = other + terms
            else:
                total = total + terms
            sign_word |= to_bits(none > x) << shift
            low_word |= to_bits(low) << shift
            middle_word |= to_bits(middle) << shift
            high_word |= to_bits(high) << shift
        words[place + j] = sign_word
        if planes >= 1:
            words[place + stride + j] = low_word
        if planes >= 2:
            words[place + 2 * stride + j] = middle_word
        if planes >= 3:
            words[place + 3 * stride + j] = high_word
        for k in range(1, 1 << planes):
            found = low_word if k & 1 else ~low_word
            found &= middle_word if k & 2 else ~middle_word
            found &= high_word if k & 4 else ~high_word
            there = bit_count(found)
            energy += float64(there) * squares[k]
            others -= there
    energy += float64(others) * squares[0]  # the zeros that fill up a word have the smallest level
    return float64(fold(total + other)), energy
