"""Nearest of a few levels, a scale for each bucket: partial sums are encoded, and their errors kept, in one pass.

A bucket of v[0..n) has sigma^2 = mean v^2; q is the nearest level to v / sigma; the scale s = sum v q / sum q^2 is
rounded to bfloat16, and s q is decoded. Of 2, 4, 8 and 16 levels codes are planes, one of signs and some of magnitudes,
in whole words of 64 codes. Of three levels five codes make a byte in base 3: in a bucket of r bytes code i is
in one with i + r, i + 2 r, ... Codes of 256 levels are bytes, level + 127.

A few buckets at a time are read from memory and stay in the first cache, so that their roots and divisions overlap.
Sums are float32 in 2 x 16 lanes: of every other 16 elements each, which are added to each other, and then halves first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, njit, uint8, uint16, uint32, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import (
    bit_count,
    fold,
    from_bits,
    greatest,
    narrow,
    to_bits,
    to_floats,
    to_integers,
    to_mask,
    to_uint8,
    to_uint32,
    widen,
)
from mpicomp.kernels.cpu.simd import (
    BYTES,
    LANES,
    absolute,
    fence,
    load,
    load_bytes,
    prefetch,
    put,
    select,
    splat,
    splat_byte,
    store,
)

AT_ONCE = 16  # buckets
NAN = np.uint16(0x7FC0)  # in bfloat16
LEAST = np.float32(1e-36)  # 127 over it is finite
HALF = np.float32(0.5)


@njit(nogil=True, inline="always")
def _round(scale):
    """Return the bits of a float64 that is rounded to float32 and then to bfloat16; NAN beyond its range."""
    bits = to_integers(float32(scale))
    bits = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    return uint16(bits) if bits < uint32(0x7F80) else NAN


@njit(nogil=True, inline="always")
def _scale(bits):
    """Return the float32 of bits of bfloat16."""
    return from_bits(uint32(uint32(bits) << uint32(16)), float32(0))  # a shift has 64 bits


@njit(nogil=True, inline="always")
def _own(u, residual, i):
    """Return 16 elements of u + residual; of u without a residual."""
    x = load(u, i)
    if residual.size:
        x = x + load(residual, i)
    return x


@njit(nogil=True)
def _gather(u, residual, i, count, v):
    """Write `count` elements of u + residual, from element i on, to v."""
    whole = count // LANES * LANES
    for k in range(0, whole, LANES):
        store(v, k, _own(u, residual, i + k))
    for k in range(whole, count):
        v[k] = u[i + k] + residual[i + k] if residual.size else u[i + k]


@njit(nogil=True, inline="always")
def _deviation(v, at, padded, n):
    """Return sigma of a bucket; NaN or infinity where a value is."""
    total, other = splat(float32(0)), splat(float32(0))
    for k in range(at, at + padded, 2 * LANES):
        x, y = load(v, k), load(v, k + LANES)
        total, other = total + x * x, other + y * y
    return np.sqrt(float64(fold(total + other)) / float64(n))


# Codes in planes ------------------------------------------------------------------------------------------------------


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
def _sizes(levels, scale, planes):
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
def _quotients(sizes, divisor):
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
def _decode(words, place, stride, planes, shift, sizes):
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
def _encode_planes(v, at, padded, n, planes, tables, sigma, words, place, u, residual, ahead):
    """Write the codes of a bucket; returns sum v q and sum q^2. Loads a later bucket from memory."""
    steps, levels, squares = tables
    limits, sizes = _limits(steps, sigma, planes), _sizes(levels, float32(1), planes)
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


# Codes in bytes -------------------------------------------------------------------------------------------------------


@njit(nogil=True, inline="always")
def _fetch(codes, place, used, digits, at):
    """Copy the bytes of a bucket to digits[at:], in whole vectors."""
    for j in range(0, used, BYTES):
        if place + j + BYTES <= codes.size:
            store(digits, at + j, load_bytes(codes, place + j))
        else:
            for i in range(j, used):
                digits[at + i] = codes[place + i]


@njit(nogil=True, inline="always")
def _hand_over(digits, first, used, codes, place):
    """Copy bytes of a bucket from digits[first:], in whole vectors: the next bucket overwrites the rest."""
    for j in range(0, used, BYTES):
        if place + j + BYTES <= codes.size:
            store(codes, place + j, load_bytes(digits, first + j))
        else:
            for i in range(j, used):
                codes[place + i] = digits[first + i]


@njit(nogil=True, inline="always")
def _unpack_three(digits, at, used):
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
def _pack_three(digits, at, used):
    """Write bytes of five digits each behind the digits of a bucket; returns their place."""
    first = at + 5 * used + BYTES
    for j in range(0, used, BYTES):
        packed = load_bytes(digits, at + j)
        for group in range(1, 5):
            packed = packed + packed + packed + load_bytes(digits, at + group * used + j)
        store(digits, first + j, packed)
    return first


@njit(nogil=True, inline="always")
def _of_bytes(digits, at, three, scale, level):
    """Return the values of 16 codes, a byte each."""
    none, code = splat(float32(0)), to_uint32(load(digits, at))
    if three:
        up = splat(scale * level)
        # the level zero of a scale that is not finite is NaN, too, or a rank's NaN would end here
        return select(code == splat(uint32(2)), up, select(code == splat(uint32(1)), up - up, none - up))
    return to_floats(code - splat(uint32(127)), float32(0)) * splat(scale)


@njit(nogil=True, inline="always")
def _encode_three(v, at, padded, least, level, digits, first, u, residual, ahead):
    """Write the codes of a bucket, a byte each; returns sum v q and sum q^2."""
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
    lost = least - least  # NaN where a value is, which is above no limit
    return float64(fold(total + other)) + lost, float64(sent) * (float64(level) * float64(level))


@njit(nogil=True, inline="always")
def _encode_bytes(v, at, padded, digits, first, u, residual, ahead):
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


# Kernels --------------------------------------------------------------------------------------------------------------


def _kernels(count: int) -> tuple[Any, Any]:
    """Return the kernels of a number of levels, which is a constant in them."""
    planes = {2: 0, 4: 1, 8: 2, 16: 3}.get(count, -1)
    three = count == 3

    def name_by_count(function: Any) -> Any:
        # compiled forms have their function's name, and one that is loaded must not stand for that of another count
        function.__qualname__ = f"{function.__name__}_{count}"
        return function

    @njit(nogil=True, inline="always")
    def count_used(n):
        """Return the words, or bytes, of the codes of a bucket."""
        if planes >= 0:
            return (planes + 1) * -(-n // 64)
        return -(-n // 5) if three else n

    @njit(nogil=True, inline="always")
    def digits_at(codes, place, n, digits, at):
        _fetch(codes, place, count_used(n), digits, at)
        return _unpack_three(digits, at, count_used(n)) if three else at

    @njit(nogil=True)
    @name_by_count
    def add(codes, place, scales, first, levels, padded, n, buckets, u, residual, i, fresh, digits, v):
        """Add decoded values to some buckets, or with `fresh` write u + residual + decoded values."""
        stride, sizes = padded // 64, _sizes(levels, float32(0), planes)
        room, start = digits.size // AT_ONCE, 0
        if planes < 0:  # of all buckets first: bytes are in the first cache before they are read in other vectors
            for b in range(buckets):
                start = digits_at(codes, place + b * count_used(n), n, digits, b * room)
        for b in range(buckets):
            scale = _scale(scales[first + b])
            if planes >= 0:
                sizes = _sizes(levels, scale, planes)
            for j in range(stride):
                for k in range(0, 64, LANES):
                    at = b * padded + 64 * j + k
                    if planes >= 0:
                        x = _decode(codes, place + j, stride, planes, uint64(k), sizes)
                    else:
                        x = _of_bytes(digits, start - (buckets - 1 - b) * room + 64 * j + k, three, scale, levels[0])
                    if fresh:
                        store(v, at, _own(u, residual, i + at) + x)
                    else:
                        store(v, at, load(v, at) + x)
            place += count_used(n)

    @njit(nogil=True)
    @name_by_count
    def encode(
        v, padded, n, buckets, tables, codes, place, scales, first, u, residual, ahead, sums, digits, streaming, left, i
    ):
        """Write the codes and scales of some buckets, and their errors to `left`; returns whether scales are finite."""
        for b in range(buckets):
            sums[b] = _deviation(v, b * padded, padded, n)
        levels, stride, room, finite = tables[1], padded // 64, digits.size // AT_ONCE, True
        sizes, none = _sizes(levels, float32(0), planes), splat(float32(0))
        # a bucket's errors are stored after the codes of the next one, so that memory has time to take them
        for b in range(buckets + 1):
            if b < buckets:
                start, near = place + b * count_used(n), ahead + b * padded
                if planes >= 0:
                    sums[AT_ONCE + b], sums[b] = _encode_planes(
                        v, b * padded, padded, n, planes, tables, sums[b], codes, start, u, residual, near
                    )
                elif three:
                    sums[2 * AT_ONCE + b] = tables[0][0] * sums[b]
                    sums[AT_ONCE + b], sums[b] = _encode_three(
                        v, b * padded, padded, sums[2 * AT_ONCE + b], levels[0], digits, b * room, u, residual, near
                    )
                    for k in range(padded, 5 * count_used(n)):
                        digits[b * room + k] = uint8(1)
                else:
                    sums[AT_ONCE + b], sums[b] = _encode_bytes(
                        v, b * padded, padded, digits, b * room, u, residual, near
                    )
            if b > 0:
                d, start = b - 1, place + (b - 1) * count_used(n)
                # without a code other than 0 both are 0
                bits = _round(sums[AT_ONCE + d] / (sums[d] if sums[d] else float64(1)))
                scales[first + d] = bits
                finite &= bits != NAN
                scale = _scale(bits)
                up, limit = splat(scale * levels[0]), splat(float32(sums[2 * AT_ONCE + d]))
                if planes >= 0:
                    sizes = _sizes(levels, scale, planes)
                for j in range(stride):
                    for k in range(0, 64, LANES):
                        at = d * padded + 64 * j + k
                        x = load(v, at)
                        if planes >= 0:
                            sent = _decode(codes, start + j, stride, planes, uint64(k), sizes)
                        elif three:  # to compare again takes less time than to unpack the code
                            sent = select(absolute(x) > limit, select(none > x, none - up, up), none)
                        else:
                            sent = _of_bytes(digits, d * room + 64 * j + k, three, scale, levels[0])
                        put(left, i + at, x - sent, streaming)
        if planes < 0:
            for b in range(buckets):
                packed = _pack_three(digits, b * room, count_used(n)) if three else b * room
                _hand_over(digits, packed, count_used(n), codes, place + b * count_used(n))
        return finite

    def relay(
        u, residual, fresh, incoming, scales_in, adds, base, starts, lengths, tables, streaming, encodes, work,
        left, codes, scales,
    ):  # fmt: skip
        """Add up a piece, and with `encodes` encode the sum and keep its error.

        Parameters
        ----------
        u : float32[n]
        residual : float32[n], or without elements
        fresh : bool
            The sum begins with u + residual, else with `left`.
        incoming, scales_in : like codes and scales
            A piece that is added with `adds`.
        base : int
            The first element of the piece.
        starts, lengths : int64[buckets]
            Elements of the vector.
        tables : (float64[levels - 1], float32[levels], float64[levels])
            Thresholds between magnitudes, magnitudes, and their squares.
        streaming : bool
            Store past the caches; `left` must then begin at a multiple of 64 bytes.
        work : (float32[AT_ONCE * bucket], uint8[AT_ONCE * (2 * bucket + 8 * BYTES)], float64[3 * AT_ONCE])
            Overwritten. The bucket is the longest one, rounded up to a multiple of 64.
        left : float32[n]
            Overwritten with the sum, or with the errors of its codes.
        codes : uint64[words] or uint8[bytes]
        scales : uint16[buckets]
            Overwritten like `codes`.

        Returns
        -------
        bool
            Whether all scales are finite.
        """
        v, digits, sums = work
        b, place, finite = 0, 0, True
        while b < lengths.size:
            i, n = starts[b] - base, lengths[b]
            padded, buckets = -(-n // 64) * 64, 1
            if padded == n:
                while buckets < AT_ONCE and b + buckets < lengths.size and lengths[b + buckets] == n:
                    buckets += 1
            fused = fresh and adds and padded == n
            if not fused:
                _gather(u if fresh else left, residual if fresh else left[:0], i, n * buckets, v)
            if adds:
                add(incoming, place, scales_in, b, tables[1], padded, n, buckets, u, residual, i, fused, digits, v)
            for k in range(n, padded if padded > n else n):
                v[k] = 0
            whole, ahead = padded == n, i + buckets * n
            if encodes and whole:
                finite &= encode(
                    v, padded, n, buckets, tables, codes, place, scales, b, u, residual, ahead, sums, digits,
                    streaming, left, i,
                )  # fmt: skip
            else:
                if encodes:
                    finite &= encode(
                        v, padded, n, 1, tables, codes, place, scales, b, u, residual, ahead, sums, digits, False, v, 0
                    )
                for k in range(n * buckets):
                    left[i + k] = v[k]
            place += buckets * count_used(n)
            b += buckets
        if streaming:
            fence()
        return finite

    def spread(codes, scales, ranks, base, starts, lengths, tables, streaming, work, out):
        """Write decoded values over the number of ranks, and zeros between the buckets.

        ranks : float32. out : float32[n] or float64[n], overwritten; with `streaming`, from a multiple of 64 bytes on.
        Other arguments as in `relay`. Returns whether all values that the scales allow are finite.
        """
        levels, like = tables[1], out.dtype.type(0)
        spare, digits, _ = work
        sizes, divisor, start = _sizes(levels, float32(0), planes), splat(ranks), 0
        place, finite, end = 0, True, 0
        for b in range(lengths.size):
            i, n = starts[b] - base, lengths[b]
            for k in range(end, i):
                out[k] = 0
            padded, scale = -(-n // 64) * 64, _scale(scales[b])
            largest = scale * (levels[levels.size - 1] if planes >= 0 or three else float32(127))
            finite &= largest - largest == 0
            if planes >= 0:
                sizes = _quotients(_sizes(levels, scale, planes), divisor)
            else:
                start = digits_at(codes, place, n, digits, 0)
            for k in range(0, padded, LANES):
                if planes >= 0:
                    x = _decode(codes, place + k // 64, padded // 64, planes, uint64(k % 64), sizes)
                else:
                    x = _of_bytes(digits, start + k, three, scale, levels[0]) / divisor
                if k + LANES <= n:
                    put(out, i + k, narrow(widen(x), like), streaming and padded == n)
                else:
                    store(spare, k, x)
            for k in range(n // LANES * LANES, n):
                out[i + k] = spare[k]
            place += count_used(n)
            end = i + n
        for k in range(end, out.size):
            out[k] = 0
        if streaming:
            fence()
        return finite

    return kernel(name_by_count(relay)), kernel(name_by_count(spread))


OF_LEVELS = {count: _kernels(count) for count in (2, 3, 4, 8, 16, 256)}
"""Kernels `relay` and `spread` of each number of levels."""
