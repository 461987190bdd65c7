"""Stochastic quantization to 2 s + 1 levels: 32 random bits an element.

The code of a level is the level itself, below zero the level plus a number `negative` that is no less than all levels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.cpu.quantizer import WORDS
from mpicomp.kernels.gpu.bucketed import (
    LINF,
    as_float32,
    bucket_of,
    buckets_of_rows,
    magnitudes,
    norms,
    of_elements,
    of_magnitude,
    rows_of_program,
    warps_of,
)
from mpicomp.kernels.gpu.common import APART, finite_flag, is_set, keep_mean, read, to_words, write
from mpicomp.kernels.gpu.philox import key_of, uniforms
from mpicomp.kernels.gpu.planes import codes_of, in_order
from mpicomp.kernels.gpu.sums import SQUARES, sums_of_buckets, total_at

__all__ = ["WORDS", "decode", "dequantize", "encode", "mean", "quantize"]

WIDTH = 1024  # elements of a program
ONE_OF_2_32 = tl.constexpr(2.0**-32)
WHOLE = tl.constexpr(0x4330000000000000)  # bits of the float64 2^52, whose last bit is 1
WHOLE_AND_256 = tl.constexpr(2.0**52 + 256)


@triton.jit
def _ratio_of(scale, levels):
    """Levels in one unit of a bucket's scale."""
    positive = scale > 0
    ratio = tl.cast(levels, tl.float64) / tl.where(positive, scale, 1).to(tl.float64)
    return tl.where(positive, ratio, 0)


@triton.jit
def _unit_of(scale, levels):
    """Return the value of one level; 0 where the scale is not finite."""
    wide = scale.to(tl.float64)
    return tl.where(wide - wide == 0, wide, 0) / tl.cast(levels, tl.float64)


@triton.jit
def _scales_at(scales, start, n, bucket, LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    number, inside, _ = buckets_of_rows(start, n, bucket, LONG, ROWS, WIDTH)
    return tl.load(scales + number, mask=inside, other=0)


@triton.jit
def _drawn_code(v, ratio, uniform, levels, negative):
    exact = tl.abs(v.to(tl.float64)) * ratio
    exact = tl.where(exact < levels, exact, tl.cast(levels, tl.float64))  # NaN becomes the highest
    level = (exact + uniform.to(tl.float64) * ONE_OF_2_32).to(tl.int32)
    return tl.where((v < 0) & (level > 0), level + negative, level)


@triton.jit
def _value_of(code, unit, levels, negative):
    level = tl.where(code > negative, negative - code, code)
    level = tl.maximum(tl.minimum(level, levels), 0 - levels)
    # Exact, and four times as fast as a conversion: the last bits of 2^52 + 256 + level, less 2^52 + 256.
    bits = (level + 256).to(tl.uint32, bitcast=True).to(tl.int64) | WHOLE
    return (bits.to(tl.float64, bitcast=True) - WHOLE_AND_256) * unit


@triton.jit(do_not_specialize=["key", "first", "step", "source", "levels", "negative"])
def _quantize_kernel(
    key, first, step, source, x, n, bucket, scales, levels, negative, codes, LONG: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * WIDTH
    v = read(x, start, n, WIDTH)
    ratio = of_elements(_ratio_of(_scales_at(scales, start, n, bucket, LONG, ROWS, WIDTH), levels), WIDTH)
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WIDTH)
    write(codes, start, n, _drawn_code(v, ratio, uniform, levels, negative).to(tl.uint8), WIDTH)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "levels", "negative", "mask"])
def _encode_kernel(
    key, first, step, source, x, n, bucket, mask, sums, blocks, buckets, scales, levels, negative, sent, bits, words,
    planes, finite, NORM: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of elements, drawn by the scales of their buckets.

    NORM : None where `scales` are given; else they are overwritten. sums : of the buckets' blocks, or their largest
    magnitudes; None where a program has whole buckets, whose largest magnitudes it finds.
    """
    start = tl.program_id(0).to(tl.int64) * WIDTH
    inside = start + tl.arange(0, WIDTH) < n
    v = read(x, start, n, WIDTH)
    if NORM is None:
        scale = _scales_at(scales, start, n, bucket, LONG, ROWS, WIDTH)
    else:
        number, _, begins = buckets_of_rows(start, n, bucket, LONG, ROWS, WIDTH)
        if sums is None:
            norm = of_magnitude(tl.max(tl.reshape(magnitudes(v, mask), [ROWS, WIDTH // ROWS]), axis=1))
        else:
            norm = total_at(sums, blocks, number, buckets)
        if NORM == SQUARES:
            norm = tl.sqrt(norm)
        scale = as_float32(norm)
        tl.store(scales + number, scale, mask=begins)
        tl.store(finite, 0, mask=tl.max((norm - norm != 0).to(tl.int32)) > 0)
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WIDTH)
    code = _drawn_code(v, of_elements(_ratio_of(scale, levels), WIDTH), uniform, levels, negative)
    code = tl.where(inside, code, 0)
    word = start // 64 + tl.arange(0, WIDTH // 64)
    to = planes + word
    rows = tl.reshape(code, [WIDTH // 64, 64])
    for j in range(bits):
        tl.store(to, to_words(((rows >> j) & 1) != 0), mask=word < words)
        to += words
    if sent is not None:
        value = _value_of(code, of_elements(_unit_of(scale, levels), WIDTH), levels, negative)
        write(sent, start, n, value.to(sent.dtype.element_ty), WIDTH)


@triton.jit
def _write(values, out, start, n, ADDING: tl.constexpr, WIDTH: tl.constexpr):
    rounded = values.to(out.dtype.element_ty)
    if ADDING:
        rounded = read(out, start, n, WIDTH) + rounded
    write(out, start, n, rounded, WIDTH)


@triton.jit(do_not_specialize=["levels", "negative"])
def _dequantize_kernel(
    codes, n, bucket, scales, levels, negative, out, ADDING: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * WIDTH
    code = read(codes, start, n, WIDTH).to(tl.int32)
    unit = of_elements(_unit_of(_scales_at(scales, start, n, bucket, LONG, ROWS, WIDTH), levels), WIDTH)
    _write(_value_of(code, unit, levels, negative), out, start, n, ADDING, WIDTH)


@triton.jit
def _decoded(
    planes, words, start, n, bucket, scales, levels, negative, BITS: tl.constexpr, LONG: tl.constexpr,
    SHARED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Values of WIDTH elements, float64[32, WIDTH / 32], a column for each word. SHARED: a word is in one bucket."""
    place = tl.arange(0, WIDTH // 32)[None, :] * 32
    if not SHARED:
        place += tl.arange(0, 32)[:, None]
    scale = tl.load(scales + bucket_of(start, place, bucket, LONG), mask=start + place < n, other=0)
    return _value_of(codes_of(planes, words, start, n, BITS, WIDTH), _unit_of(scale, levels), levels, negative)


@triton.jit(do_not_specialize=["levels", "negative", "ranks"])
def _decode_kernel(
    planes, words, n, bucket, scales, levels, negative, ranks, words_of_rank, scales_of_rank, out, finite,
    ADDING: tl.constexpr, BITS: tl.constexpr, LONG: tl.constexpr, SHARED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """finite : see `keep_mean`; None: there is one rank, whose values are written or added."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    value = _decoded(planes, words, start, n, bucket, scales, levels, negative, BITS, LONG, SHARED, WIDTH)
    if finite is not None:
        total = value.to(out.dtype.element_ty)
        for _ in range(1, ranks):
            planes += words_of_rank
            scales += scales_of_rank
            value = _decoded(planes, words, start, n, bucket, scales, levels, negative, BITS, LONG, SHARED, WIDTH)
            total += value.to(out.dtype.element_ty)
        keep_mean(in_order(total), ranks, out, start, n, finite, WIDTH)
    else:
        _write(in_order(value), out, start, n, ADDING, WIDTH)


def quantize(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, x: Tensor, bucket: int, scales: Tensor,
    levels: int, negative: int, work: Any, codes: Tensor,
) -> None:  # fmt: skip
    if n := x.numel():
        bucket = min(int(bucket), n)
        _quantize_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first), int(step), int(source), x, n, bucket, scales, int(levels), int(negative),
            codes, bucket >= WIDTH, rows_of_program(bucket, scales.numel()), WIDTH, **APART,
        )  # fmt: skip


def _norms_of(x: Tensor, bucket: int, buckets: int, norm: int | None, rows: int) -> tuple[Tensor | None, int]:
    """Return what the norms of buckets follow from, a few numbers of each, and how many; None: a program finds them."""
    if norm is None or (norm == LINF and rows * bucket <= WIDTH):
        return None, 1
    if norm != LINF:
        return sums_of_buckets(x, None, bucket, buckets, norm, rows)
    found = torch.empty(buckets, dtype=torch.float64, device=x.device)
    norms(x, bucket, norm, found)
    return found, 1


def encode(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, x: Tensor, bucket: int, norm: int | None,
    scales: Tensor, levels: int, negative: int, work: Any, sent: Tensor | None, planes: Tensor,
) -> Tensor:  # fmt: skip
    finite = finite_flag(x)
    if n := x.numel():
        bucket, buckets = min(int(bucket), n), scales.numel()
        rows = rows_of_program(bucket, buckets)
        sums, blocks = _norms_of(x, bucket, buckets, norm, rows)
        mask = torch.iinfo(torch.int32 if x.element_size() == 4 else torch.int64).max
        _encode_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first), int(step), int(source), x, n, bucket, mask, sums, blocks, buckets, scales,
            int(levels), int(negative), sent, *planes.shape, planes, finite, norm, bucket >= WIDTH, rows, WIDTH,
            num_warps=warps_of(rows), **APART,
        )  # fmt: skip
    return is_set(finite)


def dequantize(
    codes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, out: Tensor, adding: bool
) -> None:
    if n := out.numel():
        bucket = min(int(bucket), n)
        _dequantize_kernel[(triton.cdiv(n, WIDTH),)](
            codes, n, bucket, scales, int(levels), int(negative), out, bool(adding), bucket >= WIDTH,
            rows_of_program(bucket, scales.numel()), WIDTH, **APART,
        )  # fmt: skip


def _decode(
    planes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, ranks: tuple[int, int, int], out: Tensor,
    finite: Tensor | None, adding: bool,
) -> None:  # fmt: skip
    """A program is one warp. ranks : how many, int32 words of planes from one to the next, and scales."""
    if n := out.numel():
        bucket, buckets = min(int(bucket), n), scales.shape[-1]
        bits, words = planes.shape[-2:]
        _decode_kernel[(triton.cdiv(n, WIDTH),)](
            planes.view(torch.int32), 2 * words, n, bucket, scales, int(levels), int(negative), *ranks, out, finite,
            adding, bits, bucket >= WIDTH, buckets == 1 or bucket % 32 == 0, WIDTH, num_warps=1, **APART,
        )  # fmt: skip


def decode(
    planes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, work: Any, out: Tensor, adding: bool
) -> None:
    _decode(planes, bucket, scales, levels, negative, (1, 0, 0), out, None, bool(adding))


def mean(planes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, out: Tensor) -> Tensor:
    """Write the mean of what `decode` writes for each rank, added up in their order; returns whether it is finite.

    planes : int64[ranks, bits, words]. scales : float32[ranks, buckets]. Only their rows need be contiguous.
    """
    finite, ranks = finite_flag(out), (len(planes), 2 * planes.stride(0), scales.stride(0))
    _decode(planes, bucket, scales, levels, negative, ranks, out, finite, False)
    return is_set(finite)
