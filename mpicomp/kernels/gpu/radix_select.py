"""Magnitudes of elements, and the largest ones of chunks that are too long for one program.

Elements are those of a vector, or of a vector and a residual that is added on the fly. Magnitudes are integers, a
float's bits without its sign: NaN and infinity are above all numbers.

Each long chunk is divided among programs. Its threshold, the magnitude that as many elements reach as are kept, is
found digit by digit, each from a histogram of the magnitudes that begin as it does. Then each program counts the
elements that it keeps, and the last pass writes these behind those of the programs before it. x is read once for each
digit, four of float32 and eight of float64, and twice more; nothing is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART

SEGMENT = 16384  # elements of a chunk that one program goes through
STEP = 2048  # of these at a time
# Widths of digits; all bits but the sign. A histogram of 2048 bins takes 255 registers a thread with Triton 3.7.
MOST_BITS = 8
DIGITS = {torch.float32: (8, 8, 8, 7), torch.float64: (8, 8, 8, 8, 8, 8, 8, 7)}


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
def _histogram_kernel(
    x, residual, n, chunk, segments, mask, prefixes, shift, counts, most,
    FIRST: tl.constexpr, BITS: tl.constexpr, STRIDE: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add to the counts of a chunk how often its magnitudes that begin with its prefix go on with each digit.

    counts : [chunks, STRIDE]. FIRST: there are no prefixes yet, and `most` is raised to the largest magnitude.
    """
    number, _, start, stop = _segment(n, chunk, segments, LENGTH)
    bins = tl.arange(0, 1 << BITS)
    found = tl.zeros((1 << BITS,), tl.int32)
    prefix = tl.load(prefixes + number)
    top = tl.full((), 0, tl.int64)
    for first in range(0, LENGTH, WIDTH):
        at = start + first + tl.arange(0, WIDTH)
        inside = at < stop
        size = sizes(load(x, residual, at, inside), inside, mask)
        if FIRST:
            top = tl.maximum(top, tl.max(size).to(tl.int64))
        leading = size >> shift
        follows = inside & ((leading >> BITS) == prefix)
        found += tl.histogram((leading & ((1 << BITS) - 1)).to(tl.int32), 1 << BITS, mask=follows)
    tl.atomic_add(counts + number * STRIDE + bins, found.to(counts.dtype.element_ty), mask=found > 0, sem="relaxed")
    if FIRST:
        tl.atomic_max(most, top, sem="relaxed")


@triton.jit
def _digit_kernel(counts, prefixes, wanted, BITS: tl.constexpr, STRIDE: tl.constexpr):
    """Append to a chunk's prefix the digit of the magnitude that `wanted` reach, and take from `wanted` those above.

    The counts are 0 afterwards.
    """
    number = tl.program_id(0).to(tl.int64)
    digits = tl.arange(0, 1 << BITS)
    count = tl.load(counts + number * STRIDE + digits).to(tl.int64)
    tl.store(counts + number * STRIDE + digits, tl.zeros((1 << BITS,), counts.dtype.element_ty))
    left = tl.load(wanted + number)
    digit = tl.max(tl.where(tl.cumsum(count, axis=0, reverse=True) >= left, digits, 0))
    tl.store(wanted + number, left - tl.sum(tl.where(digits > digit, count, 0)))
    tl.store(prefixes + number, (tl.load(prefixes + number) << BITS) | digit)


@triton.jit
def _tally_kernel(
    x, residual, n, chunk, segments, mask, thresholds, above, equal, LENGTH: tl.constexpr, WIDTH: tl.constexpr
):
    """Count the magnitudes of each segment above the chunk's threshold, and those equal to it."""
    number, _, start, stop = _segment(n, chunk, segments, LENGTH)
    threshold = tl.load(thresholds + number)
    larger = tl.zeros((WIDTH,), tl.int32)
    same = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, LENGTH, WIDTH):
        at = start + first + tl.arange(0, WIDTH)
        inside = at < stop
        size = sizes(load(x, residual, at, inside), inside, mask)
        larger += (size > threshold).to(tl.int32)
        same += (size == threshold).to(tl.int32)
    tl.store(above + tl.program_id(0), tl.sum(larger))
    tl.store(equal + tl.program_id(0), tl.sum(same))


@triton.jit
def _collect_kernel(
    x, residual, n, chunk, keep, segments, mask, thresholds, ties, above, equal, indices, values,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the elements above the threshold, and the chunk's first `ties` of those equal to it.

    above, equal : int64[chunks, segments], how many there are in the chunk up to the end of each segment.
    """
    number, before, start, stop = _segment(n, chunk, segments, LENGTH)
    threshold = tl.load(thresholds + number)
    allowed = tl.load(ties + number)
    earlier = tl.program_id(0) - 1
    inner = before > 0
    equal_before = tl.load(equal + earlier, mask=inner, other=0)
    to = number * keep + tl.load(above + earlier, mask=inner, other=0) + tl.minimum(equal_before, allowed)
    for first in range(0, LENGTH, WIDTH):
        column = first + tl.arange(0, WIDTH)
        inside = start + column < stop
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
    """The largest of long chunks: x is read once for each digit, and twice more."""
    n, device = x.numel(), x.device
    chunks, segments = -(-n // chunk), -(-min(chunk, n) // SEGMENT)
    widths = DIGITS[x.dtype]
    wanted = torch.full((chunks,), keep, dtype=torch.int64, device=device)
    if n % chunk:
        wanted[-1:].fill_(-(-(keep * (n % chunk)) // chunk))
    prefixes = torch.zeros(chunks, dtype=torch.int64, device=device)
    stride = 1 << MOST_BITS
    counts = torch.zeros(chunks * stride, dtype=torch.int32 if n < 2**31 else torch.int64, device=device)
    shift, programs, given = sum(widths), (chunks * segments,), (x, residual, n, chunk)
    for place, bits in enumerate(widths):
        shift -= bits
        digit = place == 0, bits, stride, SEGMENT, STEP
        _histogram_kernel[programs](*given, segments, mask, prefixes, shift, counts, most, *digit, **APART)
        _digit_kernel[(chunks,)](counts, prefixes, wanted, bits, stride, **APART)
    above, equal = torch.empty((2, chunks, segments), dtype=torch.int32, device=device)
    _tally_kernel[programs](*given, segments, mask, prefixes, above, equal, SEGMENT, STEP, **APART)
    above, equal = torch.cumsum(above, 1), torch.cumsum(equal, 1)
    found = prefixes, wanted, above, equal
    _collect_kernel[programs](*given, keep, segments, mask, *found, indices, values, SEGMENT, STEP, **APART)
