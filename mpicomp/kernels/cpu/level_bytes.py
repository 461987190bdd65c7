"""Codes in bytes: of three levels, five of which make a byte in base 3, and of 256 levels.

Of three levels, in a bucket of r bytes code i is in one with i + r, i + 2 r, ... Codes of 256 levels are level + 127.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, njit, uint8, uint32

from mpicomp.kernels.cpu.lanes import (
    bit_count,
    fold,
    from_bits,
    greatest,
    to_bits,
    to_floats,
    to_integers,
    to_uint8,
    to_uint32,
)
from mpicomp.kernels.cpu.simd import (
    BYTES,
    LANES,
    absolute,
    load,
    load_bytes,
    prefetch,
    select,
    splat,
    splat_byte,
    store,
)

LEAST = np.float32(1e-36)  # 127 over it is finite
HALF = np.float32(0.5)


@njit(nogil=True, inline="always")
def copy_bytes(source, first, count, target, at):
    """Copy some bytes, in whole vectors where both arrays have them: bytes behind the last one are overwritten, too."""
    for j in range(0, count, BYTES):
        if first + j + BYTES <= source.size and at + j + BYTES <= target.size:
            store(target, at + j, load_bytes(source, first + j))
        else:
            for i in range(j, count):
                target[at + i] = source[first + i]


@njit(nogil=True, inline="always")
def unpack_three(digits, at, used):
    """Write the base-3 digits of a bucket's bytes behind them; returns their place. Others follow the last one."""
    first, power = at + -(-used // BYTES) * BYTES, uint8(81)
    one, two = splat_byte(uint8(1)), splat_byte(uint8(2))
    for group in range(5):
        large = splat_byte(power)
        for j in range(0, used, BYTES):
            rest = load_bytes(digits, at + j)
            digit = select(rest >= large, select(rest >= large + large, two, one), one - one)
            store(digits, at + j, rest - digit * large)
            store(digits, first + group * used + j, digit)
        power = uint8(power // uint8(3))
    return first


@njit(nogil=True, inline="always")
def pack_three(digits, at, used):
    """Write bytes of five digits each behind the digits of a bucket; returns their place."""
    first = at + 5 * used + BYTES
    for j in range(0, used, BYTES):
        packed = load_bytes(digits, at + j)
        for group in range(1, 5):
            packed = packed + packed + packed + load_bytes(digits, at + group * used + j)
        store(digits, first + j, packed)
    return first


@njit(nogil=True, inline="always")
def of_bytes(digits, at, three, scale, level):
    """Return the values of 16 codes, a byte each."""
    none, code = splat(float32(0)), to_uint32(load(digits, at))
    if three is not None:
        up = splat(scale * level)
        # the level zero of a scale that is not finite is NaN, too, or a rank's NaN would end here
        return select(code == splat(uint32(2)), up, select(code == splat(uint32(1)), up - up, none - up))
    return to_floats(code - splat(uint32(127)), float32(0)) * splat(scale)


@njit(nogil=True, inline="always")
def encode_three(v, at, padded, least, level, digits, first, filled, u, residual, ahead):
    """Write the codes of a bucket, a byte each, and zeros up to `filled`; returns sum v q and sum q^2."""
    limit, none, sent = splat(float32(least)), splat(float32(0)), 0
    total, other = none, none
    nothing, one, two = splat(uint32(0)), splat(uint32(1)), splat(uint32(2))
    for k in range(0, padded, LANES):
        prefetch(u, ahead + k)
        prefetch(residual, ahead + k)
        x = load(v, at + k)
        size = absolute(x)
        large = size > limit
        terms = select(large, size, none) * splat(level)
        if k & LANES:
            other = other + terms
        else:
            total = total + terms
        sent += bit_count(to_bits(large))
        store(digits, first + k, to_uint8(select(large, select(none > x, nothing, two), one)))
    for k in range(padded, filled):
        digits[first + k] = uint8(1)
    lost = least - least  # NaN where a value is, which is above no limit
    return float64(fold(total + other)) + lost, float64(sent) * (float64(level) * float64(level))


@njit(nogil=True, inline="always")
def encode_bytes(v, at, padded, digits, first, u, residual, ahead):
    """Write the codes of a bucket, a byte each; returns the largest magnitude, or NaN, and 127."""
    none = splat(float32(0))
    most, check = none, none
    for k in range(0, padded, LANES):
        prefetch(u, ahead + k)
        prefetch(residual, ahead + k)
        x = load(v, at + k)
        size = absolute(x)
        most = select(size > most, size, most)
        check = check + x * none
    # magnitudes have the order of their bits
    largest = fold(check) + from_bits(greatest(to_integers(most)), float32(0))
    ratio = float32(127.0 / float64(largest)) if largest > LEAST else float32(0)
    ratios, half, zero = splat(ratio), splat(HALF), splat(uint32(127))
    for k in range(0, padded, LANES):
        x = load(v, at + k)
        step = to_uint32(absolute(x) * ratios + half)
        store(digits, first + k, to_uint8(select(none > x, zero - step, zero + step)))
    return float64(largest) if largest > LEAST or largest != largest else float64(0), float64(127)
