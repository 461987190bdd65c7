"""Magnitudes of elements, and the largest ones of chunks that are too long for one program.

Elements are those of a vector, or of a vector and a residual that is added on the fly. Magnitudes are integers, a
float's bits without its sign: NaN and infinity are above all numbers.

Each long chunk is divided among programs, which read x twice. First they take the largest magnitude of each group of
elements. As many elements as are kept reach the magnitude that as many of these maxima reach, and few others do: their
places and magnitudes are written down when x is read again. Among them the threshold is found, the magnitude that as
many elements reach as are kept. Then each program counts the elements that it keeps, and the last pass writes these
behind those of the programs before it. Where a segment has more candidates than room, it is read again instead.

Both magnitudes are found byte by byte, from histograms of the magnitudes that begin as they do. Nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, read

SEGMENT = 16384  # elements of a chunk that one program goes through
STEP = 1024  # of these at a time; of 2048 a program takes twice the registers
FEW = 256  # of those held at a time: a segment holds some hundred candidates where one of a hundred elements is kept
DEEPEST = 16  # elements of a group
BOUND = {4: 2, 8: 3}  # bytes of the bound of candidates: all of the exponent, and 7 or 12 bits behind it
DIGITS = tl.constexpr(256)


@triton.jit
def load(x, residual, at, inside):
    """Elements of x + residual; 0 outside."""
    v = tl.load(x + at, mask=inside, other=0)
    if residual is not None:
        v = v + tl.load(residual + at, mask=inside, other=0)
    return v


@triton.jit
def sizes(v, inside, mask):
    """Magnitudes of elements; -1 outside."""
    bits = v.to(tl.int64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.int32, bitcast=True)
    return tl.where(inside, bits & mask, -1)


# A mask that ends anywhere costs accesses of 16 bytes, so only programs at the end of the vector have one.


@triton.jit
def load_rows(x, residual, left, start, column, length, n, ALIGNED: tl.constexpr):
    """Rows of x + residual, `length` elements each from `start` on; undefined elsewhere.

    left : overwritten with them, or None. start : int64[rows]. column : int32[1, width]. ALIGNED : whether starts and
    length are multiples of 4.
    """
    if ALIGNED:
        start, length = start // 4 * 4, length // 4 * 4  # as they are: so the compiler knows
    at = start[:, None] + column
    inside = column < length
    if tl.max(start) + length <= n:  # noqa: SIM108 - both sides of an expression would be computed
        v = load(x, residual, at, inside)
    else:
        v = load(x, residual, at, inside & (at < n))
    if left is not None:
        keep_rows(left, v, start, column, length, n, ALIGNED)
    return v


@triton.jit
def keep_rows(out, v, start, column, length, n, ALIGNED: tl.constexpr):
    """Overwrite rows, `length` elements each from `start` on; parameters as in `load_rows`."""
    if ALIGNED:
        start, length = start // 4 * 4, length // 4 * 4
    at = start[:, None] + column
    inside = column < length
    if tl.max(start) + length <= n:
        tl.store(out + at, v, mask=inside)
    else:
        tl.store(out + at, v, mask=inside & (at < n))


# Long chunks ----------------------------------------------------------------------------------------------------------


@triton.jit
def _segment(n, chunk, segments, LENGTH: tl.constexpr):
    """Return the chunk of the program's segment, the elements of the chunk before it, its start and stop."""
    program = tl.program_id(0).to(tl.int64)
    number = program // segments
    before = program % segments * LENGTH
    start = number * chunk + before
    return number, before, start, tl.minimum(tl.minimum(start + LENGTH, (number + 1) * chunk), n)


@triton.jit
def _sizes_from(x, residual, start, stop, mask, WIDTH: tl.constexpr):
    """Magnitudes of WIDTH elements from `start` on; -1 from `stop` on."""
    v = read(x, start, stop, WIDTH)
    if residual is not None:
        v = v + read(residual, start, stop, WIDTH)
    return sizes(v, start + tl.arange(0, WIDTH) < stop, mask)


@triton.jit
def _leading(counts, number, chunks, n, chunk, keep, rest, places):
    """Return the first bytes of the magnitude that as many of a chunk's reach as are kept, and how many of it are kept.

    keep, rest : kept elements of a whole chunk, and of the last one if that is short. counts : [places, chunks, 256],
    how many magnitudes that begin like this one have each byte at a place.
    """
    digits = tl.arange(0, DIGITS)
    prefix, left = tl.full((), 0, tl.int64), tl.where((number + 1) * chunk <= n, keep, rest).to(tl.int64)
    for place in range(0, places):
        count = tl.load(counts + (place * chunks + number) * DIGITS + digits).to(tl.int64)
        digit = tl.max(tl.where(tl.cumsum(count, axis=0, reverse=True) >= left, digits, 0))
        left -= tl.sum(tl.where(digits > digit, count, 0))
        prefix = (prefix << 8) | digit
    return prefix, left


@triton.jit
def _maxima_kernel(
    x, residual, n, chunk, segments, mask, held, found, most, DEPTH: tl.constexpr, ROOM: tl.constexpr,
    LENGTH: tl.constexpr,
):  # fmt: skip
    """Write the largest magnitudes of a segment's groups of DEPTH elements, -1 of empty ones, and raise `most`."""
    program = tl.program_id(0).to(tl.int64)
    _, _, start, stop = _segment(n, chunk, segments, LENGTH)
    top = tl.full((ROOM,), -1, held.dtype.element_ty)
    for turn in range(0, DEPTH):
        top = tl.maximum(top, _sizes_from(x, residual, start + turn * ROOM, stop, mask, ROOM))
    tl.store(held + program * ROOM + tl.arange(0, ROOM), top)
    tl.store(found + program, ROOM)
    tl.atomic_max(most, tl.max(top).to(tl.int64), sem="relaxed")


@triton.jit
def _candidates_kernel(
    x, residual, n, chunk, keep, rest, chunks, segments, mask, counts, held, found, places,
    BOUND: tl.constexpr, BYTES: tl.constexpr, ROOM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write magnitudes and places of a segment's candidates, as many as there is room for, and how many there are."""
    program = tl.program_id(0).to(tl.int64)
    number, _, start, stop = _segment(n, chunk, segments, LENGTH)
    prefix, _ = _leading(counts, number, chunks, n, chunk, keep, rest, BOUND)
    bound = (prefix << (8 * (BYTES - BOUND))).to(held.dtype.element_ty)
    taken = tl.full((), 0, tl.int32)
    for first in range(0, LENGTH, WIDTH):
        size = _sizes_from(x, residual, start + first, stop, mask, WIDTH)
        chosen = (size >= bound).to(tl.int32)
        rank = taken + tl.cumsum(chosen, axis=0) - 1
        kept = (chosen > 0) & (rank < ROOM)
        tl.store(held + program * ROOM + rank, size, mask=kept)
        tl.store(places + program * ROOM + rank, (first + tl.arange(0, WIDTH)).to(tl.int16), mask=kept)
        taken += tl.sum(chosen)
    tl.store(found + program, taken)


@triton.jit
def _held_sizes(x, residual, held, count, start, stop, first, mask, ROOM: tl.constexpr, WIDTH: tl.constexpr):
    """Some of a segment's magnitudes: of those held or, where there are more, of all elements; -1 outside."""
    if count <= ROOM:
        column = first + tl.arange(0, WIDTH)
        size = tl.load(held + tl.program_id(0).to(tl.int64) * ROOM + column, mask=column < count, other=-1)
    else:
        size = _sizes_from(x, residual, start + first, stop, mask, WIDTH)
    return size


@triton.jit(do_not_specialize=["place"])
def _histogram_kernel(
    x, residual, n, chunk, keep, rest, chunks, segments, mask, counts, held, found, place,
    BYTES: tl.constexpr, ROOM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count how often magnitudes of a chunk that begin with its first bytes go on with each byte."""
    number, _, start, stop = _segment(n, chunk, segments, LENGTH)
    prefix, _ = _leading(counts, number, chunks, n, chunk, keep, rest, place)
    count = tl.load(found + tl.program_id(0))
    length = tl.where(count <= ROOM, count, (stop - start).to(tl.int32))
    seen = tl.zeros((DIGITS,), tl.int32)
    for first in range(0, length, WIDTH):
        size = _held_sizes(x, residual, held, count, start, stop, first, mask, ROOM, WIDTH)
        leading = size >> (8 * (BYTES - 1 - place))
        follows = (size >= 0) & ((leading >> 8) == prefix)
        seen += tl.histogram((leading & (DIGITS - 1)).to(tl.int32), DIGITS, mask=follows)
    to = counts + (place * chunks + number) * DIGITS + tl.arange(0, DIGITS)
    tl.atomic_add(to, seen.to(counts.dtype.element_ty), mask=seen > 0, sem="relaxed")


@triton.jit
def _tally_kernel(
    x, residual, n, chunk, keep, rest, chunks, segments, mask, counts, held, found, above, equal,
    BYTES: tl.constexpr, ROOM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Count the magnitudes of each segment above the chunk's threshold, and those equal to it."""
    number, _, start, stop = _segment(n, chunk, segments, LENGTH)
    threshold, _ = _leading(counts, number, chunks, n, chunk, keep, rest, BYTES)
    count = tl.load(found + tl.program_id(0))
    length = tl.where(count <= ROOM, count, (stop - start).to(tl.int32))
    larger, same = tl.zeros((WIDTH,), tl.int32), tl.zeros((WIDTH,), tl.int32)
    for first in range(0, length, WIDTH):
        size = _held_sizes(x, residual, held, count, start, stop, first, mask, ROOM, WIDTH)
        larger += (size > threshold).to(tl.int32)
        same += (size == threshold).to(tl.int32)
    tl.store(above + tl.program_id(0), tl.sum(larger))
    tl.store(equal + tl.program_id(0), tl.sum(same))


@triton.jit
def _sum_before(counts, segments, WIDTH: tl.constexpr):
    """Sum of the counts of a chunk's segments before the program's, int64."""
    program = tl.program_id(0)
    before, total = program % segments, tl.full((), 0, tl.int64)
    for first in range(0, before, WIDTH):
        segment = first + tl.arange(0, WIDTH)
        total += tl.sum(tl.load(counts + (program - before) + segment, mask=segment < before, other=0).to(tl.int64))
    return total


@triton.jit
def _collect_kernel(
    x, residual, n, chunk, keep, rest, chunks, segments, mask, counts, found, places, above, equal, indices, values,
    BYTES: tl.constexpr, ROOM: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the elements above the threshold, and the first ones of the chunk that are equal to it."""
    number, before, start, stop = _segment(n, chunk, segments, LENGTH)
    threshold, allowed = _leading(counts, number, chunks, n, chunk, keep, rest, BYTES)
    count = tl.load(found + tl.program_id(0))
    length = tl.where(count <= ROOM, count, (stop - start).to(tl.int32))
    equal_before = _sum_before(equal, segments, WIDTH)
    to = number * keep + _sum_before(above, segments, WIDTH) + tl.minimum(equal_before, allowed)
    for first in range(0, length, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = start + column < stop
        if count <= ROOM:
            inside = column < count
            column = tl.load(places + tl.program_id(0).to(tl.int64) * ROOM + column, mask=inside, other=0).to(tl.int32)
        v = load(x, residual, start + column, inside)
        size = sizes(v, inside, mask)
        same = (size == threshold).to(tl.int32)
        chosen = (size > threshold) | ((same > 0) & (equal_before + tl.cumsum(same, axis=0) <= allowed))
        rank = tl.cumsum(chosen.to(tl.int32), axis=0)
        tl.store(indices + to + rank - 1, before + column, mask=chosen)
        tl.store(values + to + rank - 1, v, mask=chosen)
        equal_before += tl.sum(same)
        to += tl.sum(chosen.to(tl.int32))


def largest_of_long(
    x: Tensor, residual: Tensor | None, chunk: int, keep: int, mask: int, indices: Tensor, values: Tensor, most: Tensor
) -> None:
    """The largest of long chunks. A segment has room for as many candidates as it has groups."""
    n, device, size = x.numel(), x.device, x.element_size()
    chunks, segments = -(-n // chunk), -(-min(chunk, n) // SEGMENT)
    programs, bound = chunks * segments, BOUND[size]
    depth = max(2, min(DEEPEST, (1 << (chunk // (2 * keep)).bit_length()) // 2))
    room = SEGMENT // depth
    held = torch.empty(programs * room, dtype=torch.int32 if size == 4 else torch.int64, device=device)
    places = torch.empty(programs * room, dtype=torch.int16, device=device)
    found, above, equal = torch.empty((3, programs), dtype=torch.int32, device=device)
    counts = torch.zeros(
        (bound + size, chunks, DIGITS.value), dtype=torch.int32 if n < 2**31 else torch.int64, device=device
    )
    given = x, residual, n, chunk, keep, -(-(keep * (n % chunk)) // chunk), chunks, segments, mask
    grid, lengths = (programs,), (size, room, SEGMENT, FEW)
    _maxima_kernel[grid](x, residual, n, chunk, segments, mask, held, found, most, depth, room, SEGMENT, **APART)
    for place in range(bound):
        _histogram_kernel[grid](*given, counts[size:], held, found, place, *lengths, **APART)
    _candidates_kernel[grid](*given, counts[size:], held, found, places, bound, size, room, SEGMENT, STEP, **APART)
    for place in range(size):
        _histogram_kernel[grid](*given, counts, held, found, place, *lengths, **APART)
    _tally_kernel[grid](*given, counts, held, found, above, equal, *lengths, **APART)
    _collect_kernel[grid](*given, counts, found, places, above, equal, indices, values, *lengths, **APART)
