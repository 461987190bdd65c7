"""Nearest of a few levels: the sum of a piece, its codes and their errors, in one kernel.

Elements are laid out as [buckets, rows, 32], since sums have the order of `mpicomp.kernels.cpu.levels`: 2 x 16 lanes.
So a row has half a word of each plane, an int32. Short buckets stay in a program's registers. Sums of long ones, and of
three levels, whose bytes have codes from all over a bucket, are in `left` meanwhile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.gpu.common import (
    APART,
    LANES,
    finite_flag,
    fold,
    is_set,
    launch,
    mean_of,
    places_on,
    read_at,
    write_at,
)
from mpicomp.kernels.gpu.sixteen_bits import to_float32

ROW = tl.constexpr(32)  # elements
WIDTH = 1024  # elements of a program at a time
NAN = tl.constexpr(0x7FC0)  # in bfloat16
INFINITY = tl.constexpr(0x7F800000)
COUNT_BITS = tl.constexpr(20)  # of 65536 elements
MOST_COUNT = tl.constexpr((1 << 20) - 1)
LEAST = tl.constexpr(float(np.float32(1e-36)))  # 127 over it is finite

Table = NDArray[np.int64] | Tensor


@triton.jit
def _add_rows(lanes, rows):
    """Lanes, [buckets, 32], plus rows, [buckets, rows, 32], the first one first."""
    buckets: tl.constexpr = rows.shape[0]
    half: tl.constexpr = rows.shape[1] // 2
    if half == 0:
        return lanes + tl.reshape(rows, [buckets, ROW])
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        low, high = tl.split(tl.permute(tl.reshape(rows, [buckets, 2, half, ROW]), (0, 2, 3, 1)))
        return _add_rows(_add_rows(lanes, low), high)


@triton.jit
def _total(lanes):
    """Sum of 2 x 16 lanes, which are added to each other, and then halves first: float64[buckets]."""
    return fold(tl.sum(tl.reshape(lanes, [lanes.shape[0], 2, LANES]), axis=1)).to(tl.float64)


@triton.jit
def _places_of(starts, lengths, places, buckets, base, BUCKETS: tl.constexpr):
    """Numbers of a program's buckets, whether they exist, first elements, lengths, and first bytes."""
    number = tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS)
    there = number < buckets
    start = tl.multiple_of(tl.load(starts + number, mask=there, other=base) - base, 64)
    length = tl.load(lengths + number, mask=there, other=0).to(tl.int32)
    return number, there, start, length, tl.load(places + number, mask=there, other=0) - tl.load(places)


@triton.jit
def _turn(turn, length, shortest, ROWS: tl.constexpr):
    """Rows of each bucket in a turn, their elements, whether these exist, and whether all do."""
    row = turn * ROWS + tl.arange(0, ROWS)[None, :, None]
    i = row * ROW + tl.arange(0, ROW)[None, None, :]
    return row, i, i < length, (turn + 1) * (ROWS * ROW) <= shortest


@triton.jit
def _scales(scales, number, there):
    """Scales of buckets, float32[buckets, 1, 1]."""
    return to_float32(tl.load(scales + number, mask=there, other=0), True)[:, None, None]


# Numbers of levels: magnitudes, then their squares, then thresholds between them --------------------------------------


@triton.jit
def _magnitude(level, numbers, LEVELS: tl.constexpr):
    found = tl.load(numbers).to(tl.float32)
    for k in tl.static_range(1, LEVELS // 2):
        found = tl.where(level == k, tl.load(numbers + k).to(tl.float32), found)
    return found


@triton.jit
def _nearest(size, sigma, numbers, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """Numbers of the levels of magnitudes, int32. sigma : float64; of 256 levels, float32 steps in 1."""
    if LEVELS == 256:
        return (size * sigma + 0.5).to(tl.int32)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        level = tl.zeros(size.shape, tl.int32)
        for k in tl.static_range(STEPS):
            level += (size > (tl.load(numbers + 2 * (LEVELS // 2) + k) * sigma).to(tl.float32)).to(tl.int32)
        return level


@triton.jit
def _value(level, below, scale, nothing, numbers, LEVELS: tl.constexpr):
    """Decoded values. nothing : the level zero of three."""
    if LEVELS == 256:
        return tl.where(below, 0 - level, level).to(tl.float32) * scale
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        size = scale * _magnitude(level, numbers, LEVELS)
        if LEVELS == 3:
            size = tl.where(level == 0, nothing, size)
        return tl.where(below, 0 - size, size)


@triton.jit
def _decoded(codes, place, scale, row, length, numbers, LEVELS: tl.constexpr, PLANES: tl.constexpr):
    """Values of the codes of some rows; anything behind the last element."""
    lane = tl.arange(0, ROW)[None, None, :]
    i = row * ROW + lane
    if LEVELS == 3:
        used = (length + 4) // 5
        group = (i >= used).to(tl.int32) + (i >= 2 * used).to(tl.int32)
        group += (i >= 3 * used).to(tl.int32) + (i >= 4 * used).to(tl.int32)
        byte = tl.load(codes + place + (i - group * used), mask=i < length, other=0).to(tl.int32)
        # the byte over 81, 27, 9, 3 or 1, and the rest of that over 3; bytes that no five digits make end with twos
        by = tl.where(group < 2, tl.where(group < 1, 810, 2428), tl.where(group < 3, 7282, 21846))
        digit = (tl.minimum(byte, 242) * tl.where(group < 4, by, 65536)) >> 16
        digit -= ((digit * 21846) >> 16) * 3
        # of a scale that is not finite the level zero is NaN, too, or a rank's NaN would end here
        up = scale * _magnitude(digit, numbers, LEVELS)
        return _value((digit != 1).to(tl.int32), digit == 0, scale, up - up, numbers, LEVELS)
    elif LEVELS == 256:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        step = tl.load(codes + place + i, mask=i < length, other=127).to(tl.int32) - 127
        return _value(tl.abs(step), step < 0, scale, 0.0, numbers, LEVELS)
    else:
        words = (length + 63) // 64 * 2
        at = codes + (place >> 2) + row
        below = ((tl.load(at, mask=row < words, other=0) >> lane) & 1) != 0
        level = tl.zeros(i.shape, tl.int32)
        for plane in tl.static_range(PLANES):
            at += words
            level |= ((tl.load(at, mask=row < words, other=0) >> lane) & 1) << plane
        return _value(level, below, scale, 0.0, numbers, LEVELS)


@triton.jit
def _counts(level, first):
    """Return the counts of three levels from `first` on, side by side in int64[buckets]."""
    place = level - first
    ones = tl.where((place >= 0) & (place < 3), tl.full([1], 1, tl.int64) << (place * COUNT_BITS).to(tl.int64), 0)
    return tl.sum(tl.sum(ones, axis=2), axis=1)


@triton.jit
def _rounded(scale):
    """Bits of a float64 that is rounded to float32 and then to bfloat16, uint32; NAN beyond its range."""
    bits = scale.to(tl.float32).to(tl.uint32, bitcast=True)
    found = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits < INFINITY) & (found < (INFINITY >> 16)), found, NAN)


# Kernels --------------------------------------------------------------------------------------------------------------


@triton.jit
def _pack_three(left, start, length, codes, place, sigma, scale, numbers, BYTES: tl.constexpr):
    """Write bytes of five codes each, and overwrite sums with errors."""
    used = (length + 4) // 5
    for first in range(0, tl.max(used), BYTES):
        byte = first + tl.arange(0, BYTES)[None, :]
        packed = tl.zeros(byte.shape, tl.int32)
        for group in tl.static_range(5):
            i = group * used[:, None] + byte
            inside = (byte < used[:, None]) & (i < length[:, None])
            v = tl.load(left + start[:, None] + i, mask=inside, other=0).to(tl.float32)
            level = _nearest(tl.abs(v), sigma[:, None], numbers, 3, 1)
            packed = packed * 3 + tl.where(level == 0, 1, tl.where(v < 0, 0, 2))
            error = v - _value(level, v < 0, scale[:, None], 0.0, numbers, 3)
            tl.store(left + start[:, None] + i, error, mask=inside)
        tl.store(codes + place[:, None] + byte, packed.to(tl.uint8), mask=byte < used[:, None])


@triton.jit
def _sums(
    u, residual, incoming, scale_in, start, place, length, row, inside, whole, numbers, LEVELS: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """Sums of some rows, float32; 0 outside."""
    own = read_at(u, start, inside, whole)
    if residual is not None:
        own += read_at(residual, start, inside, whole)
    v = own.to(tl.float32)
    if incoming is not None:
        v += _decoded(incoming, place, scale_in, row, length, numbers, LEVELS, PLANES)
        v = tl.where(inside, v, 0)
    return v


@triton.jit
def _measured(v, lanes, top, LEVELS: tl.constexpr):
    """Lanes of squares with those of some rows, or of 256 levels the largest magnitudes."""
    if LEVELS == 256:
        return lanes, tl.maximum(top, tl.max(tl.max(v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF, axis=2), axis=1))
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return _add_rows(lanes, v * v), top


@triton.jit
def _total_and_sigma(lanes, top, length, LEVELS: tl.constexpr):
    """Mean squares of buckets, of 256 levels largest magnitudes, float64; and `sigma` of `_nearest`."""
    if LEVELS == 256:
        total = tl.where(top < INFINITY, top, NAN << 16).to(tl.float32, bitcast=True).to(tl.float64)
        sigma = tl.where(total > LEAST, 127 / tl.where(total > LEAST, total, 1), 0).to(tl.float32)
        return tl.where(total <= LEAST, 0, total), sigma
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        total = _total(lanes) / length.to(tl.float64)
        return total, tl.sqrt(total)


@triton.jit
def _write_codes(codes, place, i, inside, row, length, below, level, LEVELS: tl.constexpr, PLANES: tl.constexpr):
    """Write bytes of 256 levels, or planes; nothing of three levels."""
    if LEVELS == 256:
        tl.store(codes + place + i, tl.where(below, 127 - level, 127 + level).to(tl.uint8), mask=inside)
    if PLANES >= 0:
        lane, words = tl.arange(0, ROW)[None, None, :], (length + 63) // 64 * 2
        to = codes + (place >> 2) + row
        tl.store(to, tl.sum(below.to(tl.int32) << lane, axis=2, keep_dims=True), mask=row < words)
        for plane in tl.static_range(PLANES):
            to += words
            tl.store(to, tl.sum(((level >> plane) & 1) << lane, axis=2, keep_dims=True), mask=row < words)


@triton.jit
def _tallied(v, level, lanes, few, some, many, numbers, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """Lanes of products with levels, and counts of levels 1 to 3, 4 to 6 and 7, with those of some rows."""
    if LEVELS != 256:
        size = tl.where(level == 0, 0, tl.abs(v)) if LEVELS == 3 else tl.abs(v)
        lanes = _add_rows(lanes, size * _magnitude(level, numbers, LEVELS))
        few += _counts(level, 1) if STEPS > 0 else 0
        some += _counts(level, 4) if STEPS > 3 else 0
        many += _counts(level, 7) if STEPS > 6 else 0
    return lanes, few, some, many


@triton.jit
def _fitted(total, lanes, few, some, many, sigma, length, numbers, LEVELS: tl.constexpr, STEPS: tl.constexpr):
    """Bits of the scales of the least error, uint32. lanes to many : as `_tallied` returns them."""
    energy = tl.full(length.shape, 127, tl.float64)
    if LEVELS != 256:
        total, energy, others = _total(lanes), tl.zeros(length.shape, tl.float64), length.to(tl.int64)
        for k in tl.static_range(1, STEPS + 1):
            count = ((few if k < 4 else some if k < 7 else many) >> (COUNT_BITS * ((k - 1) % 3))) & MOST_COUNT
            energy += count.to(tl.float64) * tl.load(numbers + LEVELS // 2 + k % (LEVELS // 2))
            others -= count
        if LEVELS == 3:
            least = tl.load(numbers + 2) * sigma
            total += least - least  # NaN where a value is, which is above no limit
        else:
            energy += others.to(tl.float64) * tl.load(numbers + LEVELS // 2)
    return _rounded(total / tl.where(energy == 0, 1, energy))


@triton.jit
def _encode_sums(
    v, lanes, top, number, start, length, place, shortest, turns, numbers, left, codes, scales, finite,
    LEVELS: tl.constexpr, PLANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, LONG: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Encode the sums v, or those in `left` of long buckets, and overwrite `left` with the errors of the codes."""
    starts_of, lengths_of, places_of = start[:, None, None], length[:, None, None], place[:, None, None]
    total, sigma = _total_and_sigma(lanes, top, length, LEVELS)
    if LONG or LEVELS == 3:
        tl.debug_barrier()
    lanes, few = tl.zeros(lanes.shape, tl.float32), tl.zeros(length.shape, tl.int64)
    some, many = few, few
    for turn in range(turns):
        row, i, inside, whole = _turn(turn, lengths_of, shortest, ROWS)
        if LONG:
            v = read_at(left, starts_of + i, inside, whole).to(tl.float32)
        level = _nearest(tl.abs(v), sigma[:, None, None], numbers, LEVELS, STEPS)
        lanes, few, some, many = _tallied(v, level, lanes, few, some, many, numbers, LEVELS, STEPS)
        _write_codes(codes, places_of, i, inside, row, lengths_of, v < 0, level, LEVELS, PLANES)
    found = _fitted(total, lanes, few, some, many, sigma, length, numbers, LEVELS, STEPS)
    tl.store(scales + number, found.to(tl.uint16).to(tl.int16, bitcast=True), mask=length > 0)
    tl.store(finite, 0, mask=tl.max(((found == NAN) & (length > 0)).to(tl.int32)) > 0)
    scale = (found << 16).to(tl.float32, bitcast=True)
    if LONG or LEVELS == 3:
        tl.debug_barrier()
    if LEVELS == 3:
        _pack_three(left, start, length, codes, place, sigma, scale, numbers, BYTES)
    else:
        for turn in range(turns):
            row, i, inside, whole = _turn(turn, lengths_of, shortest, ROWS)
            if LONG:
                v = read_at(left, starts_of + i, inside, whole).to(tl.float32)
            level = _nearest(tl.abs(v), sigma[:, None, None], numbers, LEVELS, STEPS)
            sent = _value(level, v < 0, scale[:, None, None], 0.0, numbers, LEVELS)
            write_at(left, starts_of + i, inside, whole, v - sent)


@triton.jit(do_not_specialize=["buckets"])
def _relay_kernel(
    u, residual, incoming, scales_in, base, starts, lengths, places, buckets, numbers, left, codes, scales, finite,
    LEVELS: tl.constexpr, PLANES: tl.constexpr, STEPS: tl.constexpr, BUCKETS: tl.constexpr, ROWS: tl.constexpr,
    LONG: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """residual, incoming : None where nothing is added. codes, scales : None where the sum is not encoded."""
    number, there, start, length, place = _places_of(starts, lengths, places, buckets, base, BUCKETS)
    starts_of, lengths_of, places_of = start[:, None, None], length[:, None, None], place[:, None, None]
    shortest, turns = tl.min(length), tl.cdiv(tl.max(length), ROWS * ROW) if LONG else 1
    scale_in = _scales(scales_in, number, there) if incoming is not None else None
    lanes, top = tl.zeros([BUCKETS, ROW], tl.float32), tl.zeros([BUCKETS], tl.uint32)
    v = tl.zeros([BUCKETS, ROWS, ROW], tl.float32)
    for turn in range(turns):
        row, i, inside, whole = _turn(turn, lengths_of, shortest, ROWS)
        v = _sums(
            u, residual, incoming, scale_in, starts_of + i, places_of, lengths_of, row, inside, whole, numbers, LEVELS,
            PLANES,
        )  # fmt: skip
        if LONG or LEVELS == 3 or scales is None:
            write_at(left, starts_of + i, inside, whole, v)
        if scales is not None:
            lanes, top = _measured(v, lanes, top, LEVELS)
    if scales is not None:
        _encode_sums(
            v, lanes, top, number, start, length, place, shortest, turns, numbers, left, codes, scales, finite, LEVELS,
            PLANES, STEPS, ROWS, LONG, BYTES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["codes_of_rank", "scales_of_rank", "ranks", "buckets", "n"])
def _spread_kernel(
    codes, scales, codes_of_rank, scales_of_rank, ranks, base, starts, lengths, places, buckets, numbers, out,
    n, finite, MEAN: tl.constexpr, LEVELS: tl.constexpr, PLANES: tl.constexpr, BUCKETS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """MEAN : values of all ranks are added in the type of `out`; else those of one are divided as float32."""
    number, there, start, length, place = _places_of(starts, lengths, places, buckets, base, BUCKETS)
    starts_of, lengths_of, places_of = start[:, None, None], length[:, None, None], place[:, None, None]
    row, i, inside, whole = _turn(tl.program_id(1), lengths_of, tl.min(length), ROWS)
    scale = _scales(scales, number, there)
    value = _decoded(codes, places_of, scale, row, lengths_of, numbers, LEVELS, PLANES)
    if MEAN:
        value = tl.where(value - value == 0, value, 0).to(out.dtype.element_ty)
        for _ in range(1, ranks):
            codes += codes_of_rank
            scales += scales_of_rank
            scale = _scales(scales, number, there)
            more = _decoded(codes, places_of, scale, row, lengths_of, numbers, LEVELS, PLANES)
            value += more.to(out.dtype.element_ty)
    value = tl.where(inside, mean_of(value, ranks), 0)
    if MEAN:
        strange = tl.max(tl.max(tl.max((value - value != 0).to(tl.int32), axis=2), axis=1))
    else:
        most = 127.0 if LEVELS == 256 else tl.load(numbers + (LEVELS // 2 - 1)).to(tl.float32)
        largest = scale * most
        strange = tl.max(tl.max(tl.max((largest - largest != 0).to(tl.int32), axis=2), axis=1))
    tl.store(finite, 0, mask=strange > 0)
    # zeros up to the next multiple of 64, where the next tensor begins
    inside = (i < (lengths_of + 63) // 64 * 64) & (starts_of + i < n)
    write_at(out, starts_of + i, inside, whole, value.to(out.dtype.element_ty))


def _constants(levels: int) -> tuple[int, int, int]:
    """Return a number of levels, its planes of magnitudes, -1 without planes, and its thresholds."""
    if levels in (3, 256):
        return levels, -1, int(levels == 3)
    return levels, levels.bit_length() - 2, levels // 2 - 1


def _program(bucket: int) -> tuple[int, int]:
    """Return buckets of a program, and rows of each at a time."""
    rows = min(triton.next_power_of_2(triton.cdiv(bucket, 32)), WIDTH // 32)
    return WIDTH // (32 * rows), rows


def _numbers(tables: tuple[NDArray[Any], ...], device: torch.device) -> Tensor:
    """The numbers of levels on the device, float64."""
    thresholds, magnitudes, squares = tables
    return places_on(device, np.concatenate([magnitudes, squares, thresholds]).view(np.int64)).view(torch.float64)


def _words(codes: Any) -> Any:
    """Halves of the words of planes; bytes, or None, as they are."""
    return codes.view(torch.int32) if codes is not None and codes.dtype == torch.int64 else codes


def relay(
    levels: int, u: Tensor, residual: Tensor | None, incoming: Tensor | None, scales_in: Tensor | None, base: int,
    starts: Table, lengths: Table, places: Table, bucket: int, tables: Any, left: Tensor, codes: Tensor | None,
    scales: Tensor | None,
) -> Tensor:  # fmt: skip
    """Add up a piece, and with `codes` encode the sum; returns whether all scales are finite.

    u : begins the sum: `left`, or a vector like it. residual, incoming : added to it, or None. places : bytes
    in front of the codes of each bucket. bucket : elements of the longest one.
    """
    finite = finite_flag(left)
    if buckets := len(starts):
        layout = (places_on(left.device, table) for table in (starts, lengths, places))
        of_program, rows = _program(bucket)
        launch(
            _relay_kernel, triton.cdiv(buckets, of_program), u, residual, _words(incoming), scales_in, base, *layout,
            buckets, _numbers(tables, left.device), left, _words(codes), scales, finite, *_constants(levels),
            of_program, rows, bucket > WIDTH, triton.next_power_of_2(triton.cdiv(32 * rows, 5)),
            num_warps=left.itemsize, **APART,
        )  # fmt: skip
    return is_set(finite)


def spread(
    levels: int, codes: Tensor, scales: Tensor, ranks: int, base: int, starts: Table, lengths: Table, places: Table,
    bucket: int, tables: Any, out: Tensor, row_bytes: int | None = None,
) -> Tensor:  # fmt: skip
    """Write decoded values over the number of ranks, and zeros between buckets; returns whether all are finite.

    row_bytes : None, or the bytes from a rank's codes and scales to the next one's. Their values are then added up in
    the type of `out`; those of the first that are not finite are damage, and count as 0. Others as in `relay`.
    """
    finite = finite_flag(out)
    if buckets := len(starts):
        layout = (places_on(out.device, table) for table in (starts, lengths, places))
        (of_program, rows), words, step = _program(bucket), _words(codes), row_bytes or 0
        programs = triton.cdiv(buckets, of_program), triton.cdiv(bucket, 32 * rows)
        launch(
            _spread_kernel, programs, words, scales, step // words.itemsize, step // scales.itemsize, ranks, base,
            *layout, buckets, _numbers(tables, out.device), out, out.numel(), finite, row_bytes is not None,
            *_constants(levels)[:2], of_program, rows, num_warps=4 if row_bytes is None else 8, **APART,
        )  # fmt: skip
    return is_set(finite)
