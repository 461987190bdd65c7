"""Rows of few bits an element, one scale a row: the values, or their difference from a message.

A payload holds the scales, then the rows' codes (`mpicomp.kernels.cpu.row_codes`). A code c of b bits decodes to
(2 c - 2^b + 1) unit scale.

Uniform numbers have 16 bits: element e of a group of 512 takes the 16-bit word e mod 32 of draw e div 32.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, int32, int64, njit, uint8, uint32, uint64
from numba.cpython.unsafe.numbers import trailing_zeros

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import (
    fold,
    greatest,
    to_floats,
    to_integers,
    to_uint8,
    to_uint32,
    widen,
)  # fmt: skip
from mpicomp.kernels.cpu.philox import draw, load_keys
from mpicomp.kernels.cpu.row_codes import INFINITY_16, get_scale, pack, put_scale, scale_code, unpack
from mpicomp.kernels.cpu.simd import LANES, absolute, load, select, splat, store
from mpicomp.kernels.streams import BLOCK

TILE = 2048  # elements whose codes are made, then packed; a multiple of 64
FIXED = np.float32(65536)  # places of levels are multiples of 1 / FIXED where levels are drawn
MAGNITUDE = np.uint32(0x7FFFFFFF)


@njit(nogil=True, inline="always")
def _lanes(values, message, i):
    v = load(values, i)
    if message is not None:
        v = v - load(message, i)
    return v


@njit(nogil=True, inline="always")
def _one(values, message, i):
    v = values[i]
    if message is not None:
        v = v - message[i]
    return v


@njit(nogil=True, inline="always")
def _largest(values, message, start, stop):
    """Return the largest magnitude of a row; infinity or NaN if the row has one."""
    mask = splat(MAGNITUDE)
    top = mask ^ mask
    whole = start + (stop - start) // LANES * LANES
    for i in range(start, whole, LANES):
        bits = to_integers(_lanes(values, message, i)) & mask
        top = select(bits > top, bits, top)
    most = uint32(greatest(top))
    for i in range(whole, stop):
        one = uint32(to_integers(_one(values, message, i)) & MAGNITUDE)
        most = one if one > most else most
    return np.uint32(most).view(np.float32)


@njit(nogil=True, inline="always")
def _mean_magnitude(values, message, start, stop):
    """Return a row's mean magnitude, summed in float64 over blocks of 4096; not finite where an element is not."""
    total = float64(0)
    for begin in range(start, stop, BLOCK):
        end = min(stop, begin + BLOCK)
        whole = begin + (end - begin) // LANES * LANES
        sums = widen(splat(np.float32(0)))
        for i in range(begin, whole, LANES):
            sums = sums + widen(absolute(_lanes(values, message, i)))
        rest = float64(0)
        for i in range(whole, end):
            rest += abs(float64(_one(values, message, i)))
        total += fold(sums) + rest
    return np.float32(total / float64(stop - start))


@njit(nogil=True, inline="always")
def _signs(values, message, start, stop, codes):
    """Compute codes of one bit: 1 for 0 or more."""
    zero, one = splat(np.float32(0)), splat(np.uint8(1))
    none = one ^ one
    whole = start + (stop - start) // LANES * LANES
    for i in range(start, whole, LANES):
        store(codes, i - start, select(_lanes(values, message, i) >= zero, one, none))
    for i in range(whole, stop):
        codes[i - start] = uint8(1) if _one(values, message, i) >= np.float32(0) else uint8(0)


@njit(nogil=True, inline="always")
def _nearest(values, message, start, stop, ratio, shift, most, codes):
    """Compute codes min(floor(v ratio + shift), most)."""
    ratios, shifts, mosts = splat(ratio), splat(shift), splat(uint32(most))
    whole = start + (stop - start) // LANES * LANES
    for i in range(start, whole, LANES):
        code = to_uint32(_lanes(values, message, i) * ratios + shifts)
        store(codes, i - start, to_uint8(select(code > mosts, mosts, code)))
    for i in range(whole, stop):
        place = int32(np.float32(np.float32(_one(values, message, i) * ratio) + shift))
        codes[i - start] = uint8(min(place, int32(most)))


@njit(nogil=True, inline="always")
def _draw(values, message, start, stop, ratio, shift, most, uniform, codes):
    """Compute codes like `_nearest`, in units of 1 / FIXED, with uniform numbers added. uniform : uint16."""
    ratios, shifts, mosts, sixteen = splat(ratio), splat(shift), splat(uint32(most)), splat(uint32(16))
    whole = start + (stop - start) // LANES * LANES
    for i in range(start, whole, LANES):
        place = to_uint32(_lanes(values, message, i) * ratios + shifts)
        code = (place + to_uint32(load(uniform, i - start))) >> sixteen
        store(codes, i - start, to_uint8(select(code > mosts, mosts, code)))
    for i in range(whole, stop):
        place = int32(np.float32(np.float32(_one(values, message, i) * ratio) + shift))
        codes[i - start] = uint8(min((place + int32(uniform[i - start])) >> int32(16), int32(most)))


@njit(nogil=True, inline="always")
def _draw_uniforms(keys, group, first, n, step, source, words):
    """Draw 16 bits for each of n elements from `first`, a multiple of 32, of a row whose groups begin at `group`."""
    for turn in range((n + 31) // 32):
        at = uint64(first + 32 * turn)
        low, high = draw(keys, group + at // uint64(512), at % uint64(512) // uint64(32), step, source)
        store(words, 8 * turn, low)
        store(words, 8 * turn + 4, high)


@njit(nogil=True, inline="always")
def _write(codes, n, most, unit, scale, adding, out, at):
    """Write values of n codes to `out` from `at` on, or add them: both ends of a link run these instructions."""
    mosts, units, scales = splat(uint32(most)), splat(unit), splat(scale)
    whole = n // LANES * LANES
    for i in range(0, whole, LANES):
        code = to_uint32(load(codes, i))
        value = to_floats(code + code - mosts, unit) * units * scales
        if adding:
            value = load(out, at + i) + value
        store(out, at + i, value)
    for i in range(whole, n):
        level = np.float32(2 * int32(codes[i]) - int32(most))
        value = np.float32(np.float32(level * unit) * scale)
        out[at + i] = np.float32(out[at + i] + value) if adding else value


@kernel
def encode(
    values, message, columns, bits, unit, sixteen, stochastic, row_keys, schedule, step, source, codes, words, payload
):
    """Pack each row of the values, or of their difference from a message; then add the decoded row to the message.

    Parameters
    ----------
    values : float32[rows columns]
    message : float32[rows columns] or None
        Unchanged if a row cannot be packed.
    columns : int
        1 or more.
    bits : int
        1 to 8. 1: signs, and the mean magnitude as scale; else the largest magnitude is the scale.
    unit : float32
        2^-bits for the centres of 2^bits intervals, 1 / (2^bits - 1) for levels from end to end.
    sixteen : bool
        Scales are float16, else float32.
    stochastic : bool
        Levels from end to end are drawn; `unit` must fit.
    row_keys : int64[rows]
        Place of each row in the stream: its groups of 512 elements begin at row_keys[r] ceil(columns / 512).
    schedule, step, source
        As in `mpicomp.kernels.cpu.philox.draw_words`.
    codes : uint8[TILE]
        Working memory.
    words : uint64[TILE / 4]
        Working memory.
    payload : uint8
        Overwritten.

    Returns
    -------
    int
        0; or r + 1 if row r is too large for float16, -(r + 1) if it has NaN or infinity.
    """
    most, row_bytes = (1 << bits) - 1, (bits * columns + 7) // 8
    rows = values.size // columns
    body = (2 if sixteen else 4) * rows
    groups = uint64((columns + 511) // 512)
    half = float64(most) * 0.5 * float64(FIXED) if stochastic else float64(1 << (bits - 1))
    shift = np.float32(half + 0.5 if stochastic else half)
    keys = load_keys(schedule)
    uniform = words.view(np.uint16)
    band = 1 if message is None else max(1, rows)  # a message must not be half changed when a row is refused
    for first in range(0, rows, band):
        for r in range(first, first + band if first + band < rows else rows):
            if bits == 1:
                size = _mean_magnitude(values, message, r * columns, (r + 1) * columns)
            else:
                size = _largest(values, message, r * columns, (r + 1) * columns)
            if not np.isfinite(size):
                return -(r + 1)
            code = scale_code(size, sixteen, stochastic, bits > 1)
            if sixteen and code >= INFINITY_16:
                return r + 1
            put_scale(code, r, sixteen, payload)
        for r in range(first, first + band if first + band < rows else rows):
            scale = get_scale(r, sixteen, payload)
            ratio = np.float32(half / float64(scale)) if scale > np.float32(0) else np.float32(0)
            at = body + r * row_bytes
            for begin in range(r * columns, (r + 1) * columns, TILE):
                end = min((r + 1) * columns, begin + TILE)
                place = at + bits * (begin - r * columns) // 8
                target = payload[place : place + end - begin] if bits == 8 else codes  # bytes need no packing
                if stochastic:
                    group = uint64(row_keys[r]) * groups
                    _draw_uniforms(keys, group, begin - r * columns, end - begin, step, source, words)
                    _draw(values, message, begin, end, ratio, shift, most, uniform, target)
                elif bits == 1:
                    _signs(values, message, begin, end, target)
                else:
                    _nearest(values, message, begin, end, ratio, shift, most, target)
                if bits < 8:
                    pack(codes, end - begin, bits, words, payload, place)
                if message is not None and scale > np.float32(0):
                    _write(target, end - begin, most, unit, scale, True, message, begin)
    return 0


@kernel
def decode(payload, columns, bits, unit, sixteen, adding, codes, words, out):
    """Write or add the values of a payload. Rows of scale 0 become zeros, or stay unchanged.

    columns, bits, unit, sixteen, codes, words : as in `encode`. out : float32[rows columns].
    """
    most, row_bytes = (1 << bits) - 1, (bits * columns + 7) // 8
    rows = out.size // columns
    body = (2 if sixteen else 4) * rows
    for r in range(rows):
        scale = get_scale(r, sixteen, payload)
        for begin in range(r * columns, (r + 1) * columns, TILE):
            end = min((r + 1) * columns, begin + TILE)
            if scale == np.float32(0):
                if not adding:
                    for i in range(begin, end):
                        out[i] = np.float32(0)
                continue
            at = body + r * row_bytes + bits * (begin - r * columns) // 8
            unpack(payload, at, end - begin, bits, words, codes)
            _write(codes, end - begin, most, unit, scale, adding, out, begin)


@kernel
def mark(places, columns, keep, payload):
    """Set bit i of a row where column i is among its places. places : uint32[rows keep].

    payload : uint8[rows ceil(columns / 8)], overwritten.
    """
    row_bytes = (columns + 7) // 8
    for k in range(payload.size):
        payload[k] = uint8(0)
    for i in range(places.size):
        place = int64(places[i])
        payload[i // keep * row_bytes + place // 8] |= uint8(1 << (place % 8))


@kernel
def spread(payload, columns, keep, found, out):
    """Write a row's values where its bits are 1, else 0: the inverse of `mark`.

    Only the first `keep` set bits of a damaged row count. found : float32[rows keep]. out : float32[rows columns],
    overwritten.
    """
    row_bytes = (columns + 7) // 8
    for i in range(out.size):
        out[i] = float32(0)
    for r in range(out.size // columns):
        taken = 0
        for k in range(row_bytes):
            marks = uint64(payload[r * row_bytes + k])
            while marks:
                column = 8 * k + int64(trailing_zeros(marks))
                marks &= marks - uint64(1)
                if taken < keep and column < columns:
                    out[r * columns + column] = found[r * keep + taken]
                    taken += 1
