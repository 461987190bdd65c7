"""Numbers of each bucket: norms and means, summed in float64 over blocks of 4096 elements from the bucket's start."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.cpu.bucketed import L1, L2, LINF
from mpicomp.kernels.gpu.common import (
    APART,
    LANES,
    bits_of,
    finite_flag,
    fold,
    is_set,
    number,
    read,
    read_bits,
    to_words,
    write,
)
from mpicomp.kernels.gpu.sums import (
    SQUARES,
    STAGES,
    TOTALS,
    TURN,
    add_blocks,
    add_columns,
    add_rows,
    block_at,
    block_sums,
    blocks_of_program,
    combined,
    total_of,
)

__all__ = ["L1", "L2", "LINF", "clipped_scales", "keep_sides", "keep_signs", "norms", "side_sums", "spread"]

WIDTH = 1024  # elements of a program
TILE = 4096  # elements of a program that compares
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
FLOAT32_MAX = tl.constexpr((2 - 2.0**-23) * 2.0**127)


def _blocks(bucket: int) -> int:
    return -(-bucket // streams.BLOCK)


@triton.jit
def bucket_of(start, place, bucket, LONG: tl.constexpr):
    """Numbers of the buckets that elements start + place are in.

    start : int64. place : less than the elements of a program. LONG : whether a bucket has as many or more.
    """
    first = start // bucket
    within = start - first * bucket + place
    if LONG:
        return first + (within >= bucket).to(tl.int64)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return first + within.to(tl.int32) // bucket


@triton.jit
def _largest_kernel(bits, mask, n, bucket, pieces, out, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`pieces` of a bucket, WIDTH elements each; ROWS of them."""
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = piece // pieces
    stop = tl.minimum((number + 1) * bucket, n)
    at = (number * bucket + piece % pieces * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    size = tl.load(bits + at, mask=at < stop[:, None], other=0) & mask
    tl.atomic_max(out + number, tl.max(size, axis=1), mask=number < buckets, sem="relaxed")


def _largest(x: Tensor, bucket: int, found: Tensor) -> None:
    """Largest magnitudes, by the order of floats' bits: NaN and infinity are above all numbers."""
    kind, buckets = _INTEGERS[x.dtype], found.numel()
    bits = torch.zeros(buckets, dtype=kind, device=x.device)
    width = min(TILE, triton.next_power_of_2(bucket))
    rows, pieces = TILE // width, -(-bucket // width)
    _largest_kernel[(triton.cdiv(buckets * pieces, rows),)](
        x.view(kind), torch.iinfo(kind).max, x.numel(), bucket, pieces, bits, buckets, rows, width, **APART
    )
    found.copy_(bits.view(x.dtype))


def norms(x: Tensor, bucket: int, kind: int, found: Tensor) -> None:
    if n := x.numel():
        bucket = min(int(bucket), n)
        blocks = _blocks(bucket)
        if kind == LINF:
            _largest(x, bucket, found)
        elif blocks == 1:
            block_sums(x, None, bucket, blocks, kind, found)
        else:
            of_blocks = torch.empty(found.numel() * blocks, dtype=torch.float64, device=x.device)
            block_sums(x, None, bucket, blocks, kind, of_blocks)
            add_blocks(of_blocks, blocks, found)


@triton.jit
def as_float32(found):
    """Round to float32 once; numbers beyond it become its largest number, NaN 0."""
    known = tl.where(found == found, found, 0)
    return tl.where(known > FLOAT32_MAX, FLOAT32_MAX, tl.where(known < -FLOAT32_MAX, -FLOAT32_MAX, known)).to(
        tl.float32
    )


@triton.jit
def _clipped_kernel(sizes, squares, n, bucket, clip, scales, buckets, WIDTH: tl.constexpr):
    """sizes, squares : largest magnitude and sum of squares of each bucket, the latter None where `clip` is.

    clip : bits of a float64.
    """
    b = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = b < buckets
    size = tl.load(sizes + b, mask=inside, other=0)
    found = size
    if squares is not None:
        length = tl.maximum(tl.minimum(n - b * bucket, bucket), 1).to(tl.float64)
        sigma = tl.sqrt(tl.load(squares + b, mask=inside, other=0)) / tl.sqrt(length)
        limit = number(clip, tl.float64) * sigma
        found = tl.where(limit < size, limit, size)
    tl.store(scales + b, tl.where(size - size == 0, as_float32(found), float("inf")), mask=inside)


def clipped_scales(x: Tensor, bucket: int, clip: float | None, scales: Tensor) -> None:
    if n := x.numel():
        bucket, buckets = min(int(bucket), n), scales.numel()
        sizes = torch.empty(buckets, dtype=torch.float64, device=x.device)
        norms(x, bucket, LINF, sizes)
        squares = bits = None
        if clip is not None:
            squares, bits = torch.empty_like(sizes), bits_of(clip, torch.float64)
            norms(x, bucket, L2, squares)
        _clipped_kernel[(triton.cdiv(buckets, WIDTH),)](
            sizes, squares, n, bucket, bits, scales, buckets, WIDTH, **APART
        )


@triton.jit
def _sides_kernel(x, residual, n, bucket, blocks, tasks, sides, BLOCKS: tl.constexpr):
    task = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    start, whole, stop = block_at(task, blocks, bucket, n)
    above, below = tl.zeros([BLOCKS * LANES], tl.float64), tl.zeros([BLOCKS * LANES], tl.float64)
    count = tl.zeros([BLOCKS], tl.int32)
    for first in tl.range(0, tl.max(whole - start), TURN, num_stages=STAGES):
        at = start[:, None] + (first + tl.arange(0, TURN)[None, :])
        inside = at < whole[:, None]
        v = combined(x, residual, None, None, at, inside)
        positive = v >= 0
        above = add_rows(above, tl.where(positive, v, 0))
        below = add_rows(below, tl.where(positive, 0, v))
        count += tl.sum((positive & inside).to(tl.int32), axis=1)
    at = whole[:, None] + tl.arange(0, LANES)[None, :]
    inside = at < stop[:, None]
    v = combined(x, residual, None, None, at, inside)
    positive, wide, nothing = v >= 0, v.to(tl.float64), tl.zeros([BLOCKS], tl.float64)
    up = fold(tl.reshape(above, [BLOCKS, LANES])) + add_columns(nothing, tl.where(positive, wide, 0))
    down = fold(tl.reshape(below, [BLOCKS, LANES])) + add_columns(nothing, tl.where(positive, 0, wide))
    count += tl.sum((positive & inside).to(tl.int32), axis=1)
    tl.store(sides + task, up, mask=task < tasks)
    tl.store(sides + tasks + task, down, mask=task < tasks)
    tl.store(sides + 2 * tasks + task, count.to(tl.float64), mask=task < tasks)


def _sides(x: Tensor, residual: Tensor | None, bucket: int, buckets: int) -> Tensor:
    """float64[3, blocks]: sums of the elements that are 0 or more, of the others, and how many the former are."""
    blocks = _blocks(bucket)
    tasks, of_program = buckets * blocks, blocks_of_program(bucket)
    sides = torch.empty((3, tasks), dtype=torch.float64, device=x.device)
    _sides_kernel[(triton.cdiv(tasks, of_program),)](
        x, residual, x.numel(), bucket, blocks, tasks, sides, of_program, num_warps=1, **APART
    )
    return sides


@triton.jit
def _side_totals(sides, blocks, bucket, buckets):
    """Both totals and how many elements are 0 or more, float64, of each bucket."""
    first, stop = tl.minimum(bucket, buckets) * blocks, tl.minimum(bucket + 1, buckets) * blocks
    up, down = total_of(sides, first, stop), total_of(sides + buckets * blocks, first, stop)
    return up, down, total_of(sides + 2 * buckets * blocks, first, stop)


@triton.jit
def _side_totals_kernel(sides, blocks, buckets, above, below, n_above, ROWS: tl.constexpr):
    bucket = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    up, down, count = _side_totals(sides, blocks, bucket, buckets)
    tl.store(above + bucket, up, mask=bucket < buckets)
    tl.store(below + bucket, down, mask=bucket < buckets)
    tl.store(n_above + bucket, count.to(tl.int64), mask=bucket < buckets)


def side_sums(x: Tensor, bucket: int, above: Tensor, below: Tensor, n_above: Tensor) -> None:
    if n := x.numel():
        bucket, buckets = min(int(bucket), n), above.numel()
        sides = _sides(x, None, bucket, buckets)
        _side_totals_kernel[(triton.cdiv(buckets, TOTALS),)](
            sides, _blocks(bucket), buckets, above, below, n_above, TOTALS, num_warps=1, **APART
        )


@triton.jit
def _spread_kernel(
    bits, numbers, bucket, buckets, n, out, TWO: tl.constexpr, ADDING: tl.constexpr, LONG: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    inside = at < n
    b = bucket_of(start, place, bucket, LONG)
    high = tl.load(numbers + b, mask=inside, other=0)
    high = tl.where(high - high == 0, high, 0)
    if TWO:
        low = tl.load(numbers + buckets + b, mask=inside, other=0)
        low = tl.where(low - low == 0, low, 0)
    else:
        low = tl.where(high == 0, high, -high)
    value = tl.where(read_bits(bits, start, n, WIDTH), high, low).to(out.dtype.element_ty)
    if ADDING:
        value = read(out, start, n, WIDTH) + value
    write(out, start, n, value, WIDTH)


def spread(bits: Tensor, numbers: Tensor, bucket: int, out: Tensor, adding: bool) -> None:
    if n := out.numel():
        bucket, (kinds, buckets) = min(int(bucket), n), numbers.shape
        _spread_kernel[(triton.cdiv(n, WIDTH),)](
            bits, numbers, bucket, buckets, n, out, kinds == 2, bool(adding), bucket >= WIDTH, WIDTH, **APART
        )


@triton.jit
def _scales_kernel(sums, blocks, bucket, buckets, n, scales, KIND: tl.constexpr, ROWS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first, stop = tl.minimum(number, buckets) * blocks, tl.minimum(number + 1, buckets) * blocks
    total = total_of(sums, first, stop)
    length = tl.maximum(tl.minimum(n - number * bucket, bucket), 1).to(tl.float64)
    scale = tl.sqrt(total) / tl.sqrt(length) if KIND == SQUARES else total / length
    tl.store(scales + number, as_float32(scale), mask=number < buckets)


@triton.jit
def _means_kernel(sides, blocks, bucket, buckets, n, means, ROWS: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    up, down, count = _side_totals(sides, blocks, number, buckets)
    length = tl.minimum(n - number * bucket, bucket).to(tl.float64)
    inside = number < buckets
    tl.store(means + number, as_float32(up / tl.maximum(count, 1.0)), mask=inside)
    tl.store(means + buckets + number, as_float32(down / tl.maximum(length - count, 1.0)), mask=inside)


@triton.jit
def _pack_and_subtract_kernel(
    values, residual, n, upper, lower, bucket, left, bits, finite, LONG: tl.constexpr, WIDTH: tl.constexpr
):
    """Bit i = (x >= 0), x = values + residual; left = x less its bucket's `upper` there, else less its `lower`.

    lower : None where it is the other sign of `upper`. finite : 0 is written where not all of x is.
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    inside = start + place < n
    number = bucket_of(start, place, bucket, LONG)
    v = read(values, start, n, WIDTH)
    if residual is not None:
        v = v + read(residual, start, n, WIDTH)
    high = tl.load(upper + number, mask=inside, other=0).to(v.dtype)
    low = high * -1 if lower is None else tl.load(lower + number, mask=inside, other=0).to(v.dtype)
    positive = v >= 0
    write(left, start, n, v - tl.where(positive, high, low), WIDTH)
    word = start // 64 + tl.arange(0, WIDTH // 64)
    tl.store(bits + word, to_words(tl.reshape(positive & inside, [WIDTH // 64, 64])), mask=word * 64 < n)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def _pack_and_subtract(
    values: Tensor, residual: Tensor, upper: Tensor, lower: Tensor | None, bucket: int, left: Tensor, bits: Tensor
) -> Tensor:
    finite = finite_flag(left)
    if n := left.numel():
        _pack_and_subtract_kernel[(triton.cdiv(n, WIDTH),)](
            values, residual, n, upper, lower, bucket, left, bits, finite, bucket >= WIDTH, WIDTH, **APART
        )
    return is_set(finite)


def keep_signs(
    values: Tensor, residual: Tensor, left: Tensor, bits: Tensor, scales: Tensor, bucket: int, kind: int
) -> Tensor:
    n, buckets = left.numel(), scales.shape[1]
    if n:
        bucket = min(int(bucket), n)
        blocks = _blocks(bucket)
        sums = torch.empty(buckets * blocks, dtype=torch.float64, device=left.device)
        block_sums(values, residual, bucket, blocks, kind, sums)
        _scales_kernel[(triton.cdiv(buckets, TOTALS),)](
            sums, blocks, bucket, buckets, n, scales, kind, TOTALS, num_warps=1, **APART
        )
    return _pack_and_subtract(values, residual, scales, None, bucket, left, bits)


def keep_sides(values: Tensor, residual: Tensor, left: Tensor, bits: Tensor, means: Tensor, bucket: int) -> Tensor:
    n, buckets = left.numel(), means.shape[1]
    if n:
        bucket = min(int(bucket), n)
        sides = _sides(values, residual, bucket, buckets)
        _means_kernel[(triton.cdiv(buckets, TOTALS),)](
            sides, _blocks(bucket), bucket, buckets, n, means, TOTALS, num_warps=1, **APART
        )
    return _pack_and_subtract(values, residual, means[0], means[1], bucket, left, bits)
