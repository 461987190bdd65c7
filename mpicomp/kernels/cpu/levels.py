"""Nearest of a few levels, a scale for each bucket: partial sums are encoded, and their errors kept, in one pass.

A bucket of v[0..n) has sigma^2 = mean v^2; q is the nearest level to v / sigma; the scale s = sum v q / sum q^2 is
rounded to bfloat16, and s q is decoded. Codes of 3 and of 256 levels are bytes, those of others planes.

A few buckets at a time are read from memory and stay in the first cache, so that their roots and divisions overlap.
Sums are float32 in 2 x 16 lanes: of every other 16 elements each, which are added to each other, and then halves first.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, njit, uint16, uint32, uint64

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold, from_bits, narrow, to_integers, widen
from mpicomp.kernels.cpu.level_bytes import copy_bytes, encode_bytes, encode_three, of_bytes, pack_three, unpack_three
from mpicomp.kernels.cpu.level_planes import decode_planes, encode_planes, magnitudes_in_registers, quotients
from mpicomp.kernels.cpu.simd import BYTES, LANES, absolute, fence, load, put, select, splat, store

__all__ = ["AT_ONCE", "BYTES", "NAN", "PACKING", "relay", "spread"]

AT_ONCE = 16  # buckets
NAN = np.uint16(0x7FC0)  # in bfloat16
PACKING = {
    2: ((), None),
    4: ((0,), None),
    8: ((0,) * 2, None),
    16: ((0,) * 3, None),
    3: (None, True),
    256: (None, None),
}
"""Packing of the codes of each number of levels, whose types are constants of a compiled form.

planes: a tuple as long as there are planes of magnitudes, or None. three: None unless five codes make a byte.
"""


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


@njit(nogil=True, inline="always")
def _count_used(n, planes, three):
    """Return the words, or bytes, of the codes of a bucket."""
    if planes is not None:
        return (len(planes) + 1) * -(-n // 64)
    return n if three is None else -(-n // 5)


@njit(nogil=True, inline="always")
def _unpack(codes, place, n, digits, at, three):
    """Write the codes of a bucket, a byte each, behind digits[at]; returns the place of the first."""
    used = _count_used(n, None, three)
    copy_bytes(codes, place, used, digits, at)
    return at if three is None else unpack_three(digits, at, used)


@njit(nogil=True)
def _pack(digits, n, buckets, codes, place, three):
    """Write the codes of some buckets, of which `digits` has a byte each."""
    used, room = _count_used(n, None, three), digits.size // AT_ONCE
    for b in range(buckets):
        packed = b * room if three is None else pack_three(digits, b * room, used)
        copy_bytes(digits, packed, used, codes, place + b * used)  # the next bucket overwrites bytes behind


@njit(nogil=True)
def _add_planes(planes, codes, place, scales, first, levels, padded, n, buckets, u, residual, i, fresh, v):
    """Add decoded values to some buckets, or with `fresh` write u + residual + decoded values."""
    count, stride = len(planes), padded // 64
    for b in range(buckets):
        sizes = magnitudes_in_registers(levels, _scale(scales[first + b]), count)
        for j in range(stride):
            for k in range(0, 64, LANES):
                at = b * padded + 64 * j + k
                x = decode_planes(codes, place + j, stride, count, uint64(k), sizes)
                before = _own(u, residual, i + at) if fresh else load(v, at)
                store(v, at, before + x)
        place += _count_used(n, planes, None)


@njit(nogil=True)
def _add_bytes(three, codes, place, scales, first, levels, padded, n, buckets, u, residual, i, fresh, v, digits):
    """Do as `_add_planes` with codes in bytes."""
    used, room, start = _count_used(n, None, three), digits.size // AT_ONCE, 0
    for b in range(buckets):  # all first: bytes are in the first cache before they are read in other vectors
        start = _unpack(codes, place + b * used, n, digits, b * room, three)
    for b in range(buckets):
        scale = _scale(scales[first + b])
        for k in range(0, padded, LANES):
            at = b * padded + k
            x = of_bytes(digits, start - (buckets - 1 - b) * room + k, three, scale, levels[0])
            before = _own(u, residual, i + at) if fresh else load(v, at)
            store(v, at, before + x)


@njit(nogil=True)
def _encode(
    planes, three, v, padded, n, buckets, tables, codes, place, scales, first, u, residual, ahead, sums, digits,
    streaming, left, i,
):  # fmt: skip
    """Write the codes and scales of some buckets, and their errors to `left`; returns whether scales are finite."""
    for b in range(buckets):
        sums[b] = _deviation(v, b * padded, padded, n)
    used, count = _count_used(n, planes, three), 0 if planes is None else len(planes)
    levels, stride, room, finite = tables[1], padded // 64, digits.size // AT_ONCE, True
    sizes, none = magnitudes_in_registers(levels, float32(0), count), splat(float32(0))
    # a bucket's errors are stored after the codes of the next one, so that memory has time to take them
    for b in range(buckets + 1):
        if b < buckets:
            start, near, to = place + b * used, ahead + b * padded, b * room
            if planes is not None:
                sums[AT_ONCE + b], sums[b] = encode_planes(
                    v, b * padded, padded, n, count, tables, sums[b], codes, start, u, residual, near
                )
            elif three is not None:
                least = sums[2 * AT_ONCE + b] = tables[0][0] * sums[b]
                sums[AT_ONCE + b], sums[b] = encode_three(
                    v, b * padded, padded, least, levels[0], digits, to, 5 * used, u, residual, near
                )
            else:
                sums[AT_ONCE + b], sums[b] = encode_bytes(v, b * padded, padded, digits, to, u, residual, near)
        if b > 0:
            d, start = b - 1, place + (b - 1) * used
            # without a code other than 0 both are 0
            bits = scales[first + d] = _round(sums[AT_ONCE + d] / (sums[d] if sums[d] else float64(1)))
            finite &= bits != NAN
            scale = _scale(bits)
            up, limit = splat(scale * levels[0]), splat(float32(sums[2 * AT_ONCE + d]))
            if planes is not None:
                sizes = magnitudes_in_registers(levels, scale, count)
            for j in range(stride):
                for k in range(0, 64, LANES):
                    at = d * padded + 64 * j + k
                    x = load(v, at)
                    if planes is not None:
                        sent = decode_planes(codes, start + j, stride, count, uint64(k), sizes)
                    elif three is not None:  # to compare again takes less time than to unpack the code
                        sent = select(absolute(x) > limit, select(none > x, none - up, up), none)
                    else:
                        sent = of_bytes(digits, d * room + 64 * j + k, three, scale, levels[0])
                    put(left, i + at, x - sent, streaming)
    if planes is None:
        _pack(digits, n, buckets, codes, place, three)
    return finite


@kernel
def relay(
    planes, three, u, residual, fresh, incoming, scales_in, adds, base, starts, lengths, tables, streaming, encodes,
    work, left, codes, scales,
):  # fmt: skip
    """Add up a piece, and with `encodes` encode the sum and keep its error. Returns whether all scales are finite.

    Parameters
    ----------
    planes, three
        Those of `PACKING`; Numba compiles a form for each.
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
        added = incoming, place, scales_in, b, tables[1], padded, n, buckets, u, residual, i, fused, v
        if adds:
            if planes is not None:
                _add_planes(planes, *added)
            else:
                _add_bytes(three, *added, digits)
        for k in range(n, padded if padded > n else n):
            v[k] = 0
        whole, ahead = padded == n, i + buckets * n
        if encodes and whole:
            finite &= _encode(
                planes, three, v, padded, n, buckets, tables, codes, place, scales, b, u, residual, ahead, sums, digits,
                streaming, left, i,
            )  # fmt: skip
        else:
            if encodes:
                finite &= _encode(
                    planes, three, v, padded, n, 1, tables, codes, place, scales, b, u, residual, ahead, sums, digits,
                    False, v, 0,
                )  # fmt: skip
            for k in range(n * buckets):
                left[i + k] = v[k]
        place += buckets * _count_used(n, planes, three)
        b += buckets
    if streaming:
        fence()
    return finite


@kernel
def spread(planes, three, codes, scales, ranks, base, starts, lengths, tables, streaming, work, out):
    """Write decoded values over the number of ranks, and zeros between the buckets.

    ranks : float32. out : float32[n] or float64[n], overwritten; with `streaming`, from a multiple of 64 bytes on.
    Other arguments as in `relay`. Returns whether all values that the scales allow are finite.
    """
    count, levels, like = 0 if planes is None else len(planes), tables[1], out.dtype.type(0)
    spare, digits, _ = work
    sizes, divisor, start = magnitudes_in_registers(levels, float32(0), count), splat(ranks), 0
    place, finite, end = 0, True, 0
    for b in range(lengths.size):
        i, n = starts[b] - base, lengths[b]
        for k in range(end, i):
            out[k] = 0
        padded, scale = -(-n // 64) * 64, _scale(scales[b])
        largest = scale * (float32(127) if planes is None and three is None else levels[levels.size - 1])
        finite &= largest - largest == 0
        if planes is not None:
            sizes = quotients(magnitudes_in_registers(levels, scale, count), divisor)
        else:
            start = _unpack(codes, place, n, digits, 0, three)
        for k in range(0, padded, LANES):
            if planes is not None:
                x = decode_planes(codes, place + k // 64, padded // 64, count, uint64(k % 64), sizes)
            else:
                x = of_bytes(digits, start + k, three, scale, levels[0]) / divisor
            if k + LANES <= n:
                put(out, i + k, narrow(widen(x), like), streaming and padded == n)
            else:
                store(spare, k, x)
        for k in range(n // LANES * LANES, n):
            out[i + k] = spare[k]
        place += _count_used(n, planes, three)
        end = i + n
    for k in range(end, out.size):
        out[k] = 0
    if streaming:
        fence()
    return finite
