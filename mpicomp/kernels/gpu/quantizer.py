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
from mpicomp.kernels.gpu.bucketed import L2, as_float32, bucket_of, norms
from mpicomp.kernels.gpu.common import APART, finite_flag, is_set, read, to_words, write
from mpicomp.kernels.gpu.philox import key_of, uniforms
from mpicomp.kernels.gpu.planes import read_planes

__all__ = ["WORDS", "decode", "dequantize", "encode", "quantize"]

WIDTH = 1024  # elements of a program
ONE_OF_2_32 = tl.constexpr(2.0**-32)


@triton.jit
def _scales_kernel(found, buckets, scales, finite, SQUARED: tl.constexpr, WIDTH: tl.constexpr):
    """Norms as scales; finite : 0 is written where one is not."""
    bucket = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    norm = tl.load(found + bucket, mask=bucket < buckets, other=0)
    if SQUARED:
        norm = tl.sqrt(norm)
    tl.store(scales + bucket, as_float32(norm), mask=bucket < buckets)
    tl.store(finite, 0, mask=tl.max((norm - norm != 0).to(tl.int32)) > 0)


@triton.jit
def _ratios_kernel(scales, levels, buckets, ratios, WIDTH: tl.constexpr):
    """Levels in one unit of each bucket."""
    bucket = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    scale = tl.load(scales + bucket, mask=bucket < buckets, other=0).to(tl.float64)
    positive = scale > 0
    ratio = tl.cast(levels, tl.float64) / tl.where(positive, scale, 1)
    tl.store(ratios + bucket, tl.where(positive, ratio, 0), mask=bucket < buckets)


@triton.jit
def _unit_of(scale, levels):
    """Return the value of one level; 0 where the scale is not finite."""
    wide = scale.to(tl.float64)
    return tl.where(wide - wide == 0, wide, 0) / tl.cast(levels, tl.float64)


@triton.jit
def _units_kernel(scales, levels, buckets, units, WIDTH: tl.constexpr):
    bucket = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    scale = tl.load(scales + bucket, mask=bucket < buckets, other=0)
    tl.store(units + bucket, _unit_of(scale, levels), mask=bucket < buckets)


@triton.jit
def _drawn_code(v, ratio, uniform, levels, negative):
    exact = tl.abs(v.to(tl.float64)) * ratio
    exact = tl.where(exact < levels, exact, tl.cast(levels, tl.float64))  # NaN becomes the highest
    level = (exact + uniform.to(tl.float64) * ONE_OF_2_32).to(tl.int32)
    return tl.where((v < 0) & (level > 0), level + negative, level)


@triton.jit
def _value_of(code, unit, levels, negative):
    below = code > negative
    level = tl.minimum(tl.where(below, code - negative, code), levels)
    # Triton before 3.8 takes -x for 0 - x, which is +0 where x is 0
    return level.to(tl.float64) * tl.where(below, unit * -1, unit)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "levels", "negative"])
def _quantize_kernel(
    key, first, step, source, x, n, bucket, ratios, levels, negative, codes, LONG: tl.constexpr, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    v = read(x, start, n, WIDTH)
    ratio = tl.load(ratios + bucket_of(start, place, bucket, LONG), mask=at < n, other=0)
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WIDTH)
    write(codes, start, n, _drawn_code(v, ratio, uniform, levels, negative).to(tl.uint8), WIDTH)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "levels", "negative"])
def _encode_kernel(
    key, first, step, source, x, n, bucket, ratios, units, levels, negative, sent, bits, words, planes,
    LONG: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    inside = at < n
    v = read(x, start, n, WIDTH)
    b = bucket_of(start, place, bucket, LONG)
    ratio = tl.load(ratios + b, mask=inside, other=0)
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WIDTH)
    code = tl.where(inside, _drawn_code(v, ratio, uniform, levels, negative), 0)
    word = start // 64 + tl.arange(0, WIDTH // 64)
    to = planes + word
    rows = tl.reshape(code, [WIDTH // 64, 64])
    for j in range(bits):
        tl.store(to, to_words(((rows >> j) & 1) != 0), mask=word < words)
        to += words
    if sent is not None:
        unit = tl.load(units + b, mask=inside, other=0)
        write(sent, start, n, _value_of(code, unit, levels, negative).to(sent.dtype.element_ty), WIDTH)


@triton.jit
def _write(values, out, start, n, ADDING: tl.constexpr, WIDTH: tl.constexpr):
    rounded = values.to(out.dtype.element_ty)
    if ADDING:
        rounded = read(out, start, n, WIDTH) + rounded
    write(out, start, n, rounded, WIDTH)


@triton.jit(do_not_specialize=["levels", "negative"])
def _dequantize_kernel(
    codes, n, bucket, units, levels, negative, out, ADDING: tl.constexpr, LONG: tl.constexpr, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    code = read(codes, start, n, WIDTH).to(tl.int32)
    unit = tl.load(units + bucket_of(start, place, bucket, LONG), mask=at < n, other=0)
    _write(_value_of(code, unit, levels, negative), out, start, n, ADDING, WIDTH)


@triton.jit(do_not_specialize=["levels", "negative"])
def _decode_kernel(
    planes, bits, words, n, bucket, units, levels, negative, out, ADDING: tl.constexpr, LONG: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    code = read_planes(planes, bits, words, start, n, WIDTH)
    unit = tl.load(units + bucket_of(start, place, bucket, LONG), mask=at < n, other=0)
    _write(_value_of(code, unit, levels, negative), out, start, n, ADDING, WIDTH)


def _of_buckets(kernel: Any, scales: Tensor, levels: int) -> Tensor:
    """Run a kernel that computes a float64 number of each scale."""
    buckets = scales.numel()
    made = torch.empty(buckets, dtype=torch.float64, device=scales.device)
    kernel[(triton.cdiv(buckets, WIDTH),)](scales, int(levels), buckets, made, WIDTH, **APART)
    return made


def quantize(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, x: Tensor, bucket: int, scales: Tensor,
    levels: int, negative: int, work: Any, codes: Tensor,
) -> None:  # fmt: skip
    if n := x.numel():
        bucket, ratios = min(int(bucket), n), _of_buckets(_ratios_kernel, scales, levels)
        _quantize_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first), int(step), int(source), x, n, bucket, ratios,
            int(levels), int(negative), codes, bucket >= WIDTH, WIDTH, **APART,
        )  # fmt: skip


def encode(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, x: Tensor, bucket: int, norm: int | None,
    scales: Tensor, levels: int, negative: int, work: Any, sent: Tensor | None, planes: Tensor,
) -> Tensor:  # fmt: skip
    finite = finite_flag(x)
    if n := x.numel():
        bucket, buckets = min(int(bucket), n), scales.numel()
        if norm is not None:
            found = torch.empty(buckets, dtype=torch.float64, device=x.device)
            norms(x, bucket, norm, found)
            _scales_kernel[(triton.cdiv(buckets, WIDTH),)](found, buckets, scales, finite, norm == L2, WIDTH, **APART)
        ratios = _of_buckets(_ratios_kernel, scales, levels)
        units = None if sent is None else _of_buckets(_units_kernel, scales, levels)
        _encode_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first), int(step), int(source), x, n, bucket, ratios,
            units, int(levels), int(negative), sent, *planes.shape, planes, bucket >= WIDTH, WIDTH, **APART,
        )  # fmt: skip
    return is_set(finite)


def dequantize(
    codes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, out: Tensor, adding: bool
) -> None:
    if n := out.numel():
        bucket, units = min(int(bucket), n), _of_buckets(_units_kernel, scales, levels)
        _dequantize_kernel[(triton.cdiv(n, WIDTH),)](
            codes, n, bucket, units, int(levels), int(negative), out, bool(adding), bucket >= WIDTH, WIDTH, **APART
        )


def decode(
    planes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, work: Any, out: Tensor, adding: bool
) -> None:
    if n := out.numel():
        bucket, units = min(int(bucket), n), _of_buckets(_units_kernel, scales, levels)
        _decode_kernel[(triton.cdiv(n, WIDTH),)](
            planes, *planes.shape, n, bucket, units, int(levels), int(negative), out, bool(adding), bucket >= WIDTH,
            WIDTH, **APART,
        )  # fmt: skip
