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
    keep_mean,
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
    few_sums,
    sums_of_buckets,
    total_at,
)

__all__ = [
    "L1",
    "L2",
    "LINF",
    "clipped_scales",
    "keep_sides",
    "keep_signs",
    "mean_of_sides",
    "norms",
    "side_sums",
    "spread",
]

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


def rows_of_program(bucket: int, buckets: int) -> int:
    """Return into how many stretches of one bucket each, of equal length, the elements of a program are divided."""
    if buckets == 1 or bucket % WIDTH == 0:
        return 1
    return WIDTH // bucket if WIDTH % bucket == 0 else WIDTH


def warps_of(rows: int) -> int:
    """Return warps of a program that computes numbers of so many stretches."""
    return 8 if rows == WIDTH else 4


@triton.jit
def buckets_of_rows(start, n, bucket, LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Number of each stretch's bucket, int64[ROWS], whether it has elements, and whether its bucket begins there."""
    place = tl.arange(0, ROWS) * (WIDTH // ROWS)
    number = bucket_of(start, place, bucket, LONG)
    inside = start + place < n
    return number, inside, inside & (start + place == number * bucket)


@triton.jit
def of_elements(rows, WIDTH: tl.constexpr):
    """The number of each element's stretch."""
    ROWS: tl.constexpr = rows.shape[0]
    return tl.reshape(tl.broadcast_to(rows[:, None], [ROWS, WIDTH // ROWS]), [WIDTH])


@triton.jit
def magnitudes(v, mask):
    """Bits of magnitudes: NaN and infinity are above all numbers."""
    bits = v.to(tl.int64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.int32, bitcast=True)
    return bits & mask


@triton.jit
def of_magnitude(bits):
    """The float64 that bits of a magnitude stand for."""
    if bits.dtype == tl.int64:
        return bits.to(tl.float64, bitcast=True)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _largest_kernel(x, mask, n, bucket, pieces, tops, found, buckets, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest magnitudes of `pieces` of a bucket, WIDTH elements each; ROWS of them.

    found : float64, overwritten. tops : bits of the buckets' largest so far; None where a bucket is one piece.
    """
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = piece // pieces
    stop = tl.minimum((number + 1) * bucket, n)
    at = (number * bucket + piece % pieces * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    top = tl.max(magnitudes(tl.load(x + at, mask=at < stop[:, None], other=0), mask), axis=1)
    if tops is None:
        tl.store(found + number, of_magnitude(top), mask=number < buckets)
    else:
        tl.atomic_max(tops + number, top, mask=number < buckets, sem="relaxed")


def _largest(x: Tensor, bucket: int, found: Tensor) -> None:
    kind, buckets = _INTEGERS[x.dtype], found.numel()
    width = min(TILE, triton.next_power_of_2(bucket))
    rows, pieces = TILE // width, -(-bucket // width)
    tops = None if pieces == 1 else torch.zeros(buckets, dtype=kind, device=x.device)
    _largest_kernel[(triton.cdiv(buckets * pieces, rows),)](
        x, torch.iinfo(kind).max, x.numel(), bucket, pieces, tops, found, buckets, rows, width, **APART
    )
    if tops is not None:
        found.copy_(tops.view(x.dtype))


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
        v = combined(x, residual, at, inside)
        positive = v >= 0
        above = add_rows(above, tl.where(positive, v, 0))
        below = add_rows(below, tl.where(positive, 0, v))
        count += tl.sum((positive & inside).to(tl.int32), axis=1)
    at = whole[:, None] + tl.arange(0, LANES)[None, :]
    inside = at < stop[:, None]
    v = combined(x, residual, at, inside)
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
    all_blocks = buckets * blocks
    up, down = total_at(sides, blocks, bucket, buckets), total_at(sides + all_blocks, blocks, bucket, buckets)
    return up, down, total_at(sides + 2 * all_blocks, blocks, bucket, buckets)


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
        sides, blocks = few_sums(_sides(x, None, bucket, buckets).view(-1), _blocks(bucket), TOTALS)
        _side_totals_kernel[(triton.cdiv(buckets, TOTALS),)](
            sides, blocks, buckets, above, below, n_above, TOTALS, num_warps=1, **APART
        )


@triton.jit
def _side_values(bits, numbers, start, n, number, inside, buckets, TWO: tl.constexpr, WIDTH: tl.constexpr):
    high = tl.load(numbers + number, mask=inside, other=0)
    high = tl.where(high - high == 0, high, 0)
    if TWO:
        low = tl.load(numbers + buckets + number, mask=inside, other=0)
        low = tl.where(low - low == 0, low, 0)
    else:
        low = tl.where(high == 0, high, -high)
    return tl.where(read_bits(bits, start, n, WIDTH), high, low)


@triton.jit
def _spread_kernel(
    bits, numbers, bucket, buckets, n, ranks, words_of_rank, numbers_of_rank, out, finite, TWO: tl.constexpr,
    ADDING: tl.constexpr, LONG: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """finite : see `keep_mean`; None: there is one rank, whose values are written or added."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    inside = start + place < n
    b = bucket_of(start, place, bucket, LONG)
    value = _side_values(bits, numbers, start, n, b, inside, buckets, TWO, WIDTH).to(out.dtype.element_ty)
    if ADDING:
        value = read(out, start, n, WIDTH) + value
    if finite is not None:
        for _ in range(1, ranks):
            bits += words_of_rank
            numbers += numbers_of_rank
            value += _side_values(bits, numbers, start, n, b, inside, buckets, TWO, WIDTH).to(out.dtype.element_ty)
        keep_mean(value, ranks, out, start, n, finite, WIDTH)
    else:
        write(out, start, n, value, WIDTH)


def spread(bits: Tensor, numbers: Tensor, bucket: int, out: Tensor, adding: bool) -> None:
    if n := out.numel():
        bucket, (kinds, buckets) = min(int(bucket), n), numbers.shape
        _spread_kernel[(triton.cdiv(n, WIDTH),)](
            bits, numbers, bucket, buckets, n, 1, 0, 0, out, None, kinds == 2, bool(adding), bucket >= WIDTH, WIDTH,
            **APART,
        )  # fmt: skip


def mean_of_sides(bits: Tensor, numbers: Tensor, bucket: int, mean: Tensor) -> Tensor:
    """Write the mean of what `spread` writes for each rank, added up in their order; returns whether it is finite.

    bits : int64[ranks, words]. numbers : float32[ranks, kinds, buckets]. Only their rows need be contiguous.
    """
    finite, (ranks, kinds, buckets) = finite_flag(mean), numbers.shape
    if n := mean.numel():
        bucket = min(int(bucket), n)
        _spread_kernel[(triton.cdiv(n, WIDTH),)](
            bits, numbers, bucket, buckets, n, ranks, bits.stride(0), numbers.stride(0), mean, finite, kinds == 2,
            False, bucket >= WIDTH, WIDTH, **APART,
        )  # fmt: skip
    return is_set(finite)


@triton.jit
def _means_of(sums, blocks, bucket, buckets, n, number, KIND: tl.constexpr):
    """Root of the mean square, or mean magnitude, of buckets, as float32. sums : those of their blocks."""
    total = total_at(sums, blocks, number, buckets)
    length = tl.maximum(tl.minimum(n - number * bucket, bucket), 1).to(tl.float64)
    return as_float32(tl.sqrt(total) / tl.sqrt(length) if KIND == SQUARES else total / length)


@triton.jit
def _means_of_sides(sides, blocks, bucket, buckets, n, number):
    """Means of the elements of buckets that are 0 or more, and of the others, as float32."""
    up, down, count = _side_totals(sides, blocks, number, buckets)
    length = tl.minimum(n - number * bucket, bucket).to(tl.float64)
    return as_float32(up / tl.maximum(count, 1.0)), as_float32(down / tl.maximum(length - count, 1.0))


@triton.jit
def _pack_and_subtract_kernel(
    values, residual, n, sums, blocks, bucket, buckets, numbers, left, bits, finite, KIND: tl.constexpr,
    LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Bit i = (x >= 0), x = values + residual; left = x less its bucket's upper number there, else less its lower one.

    sums : of the buckets' blocks; with KIND None those of `_sides`. numbers : float32[kinds, buckets], overwritten.
    finite : 0 is written where not all of x is.
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH
    inside = start + tl.arange(0, WIDTH) < n
    number, _, begins = buckets_of_rows(start, n, bucket, LONG, ROWS, WIDTH)
    if KIND is None:
        above, below = _means_of_sides(sums, blocks, bucket, buckets, n, number)
        tl.store(numbers + buckets + number, below, mask=begins)
    else:
        above = _means_of(sums, blocks, bucket, buckets, n, number, KIND)
        below = above * -1
    tl.store(numbers + number, above, mask=begins)
    v = read(values, start, n, WIDTH)
    if residual is not None:
        v = v + read(residual, start, n, WIDTH)
    positive = v >= 0
    sent = tl.where(positive, of_elements(above, WIDTH), of_elements(below, WIDTH)).to(v.dtype)
    write(left, start, n, v - sent, WIDTH)
    word = start // 64 + tl.arange(0, WIDTH // 64)
    tl.store(bits + word, to_words(tl.reshape(positive & inside, [WIDTH // 64, 64])), mask=word * 64 < n)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def _pack_and_subtract(
    values: Tensor, residual: Tensor, sums: tuple[Tensor, int], bucket: int, numbers: Tensor, left: Tensor,
    bits: Tensor, kind: int | None, rows: int,
) -> Tensor:  # fmt: skip
    finite, n, buckets = finite_flag(left), left.numel(), numbers.shape[1]
    _pack_and_subtract_kernel[(triton.cdiv(n, WIDTH),)](
        values, residual, n, *sums, bucket, buckets, numbers, left, bits, finite, kind, bucket >= WIDTH, rows, WIDTH,
        num_warps=warps_of(rows), **APART,
    )  # fmt: skip
    return is_set(finite)


def keep_signs(
    values: Tensor, residual: Tensor, left: Tensor, bits: Tensor, scales: Tensor, bucket: int, kind: int
) -> Tensor:
    if not (n := left.numel()):
        return is_set(finite_flag(left))
    bucket, buckets = min(int(bucket), n), scales.shape[1]
    rows = rows_of_program(bucket, buckets)
    sums = sums_of_buckets(values, residual, bucket, buckets, kind, rows)
    return _pack_and_subtract(values, residual, sums, bucket, scales, left, bits, kind, rows)


def keep_sides(values: Tensor, residual: Tensor, left: Tensor, bits: Tensor, means: Tensor, bucket: int) -> Tensor:
    if not (n := left.numel()):
        return is_set(finite_flag(left))
    bucket, buckets = min(int(bucket), n), means.shape[1]
    rows = rows_of_program(bucket, buckets)
    sides = few_sums(_sides(values, residual, bucket, buckets).view(-1), _blocks(bucket), rows)
    return _pack_and_subtract(values, residual, sides, bucket, means, left, bits, None, rows)
