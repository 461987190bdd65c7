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

from mpicomp.kernels.cpu.quantizer import TILE
from mpicomp.kernels.gpu.bucketed import bucket_of
from mpicomp.kernels.gpu.common import APART
from mpicomp.kernels.gpu.philox import key_of, uniforms

__all__ = ["TILE", "dequantize", "quantize"]

WIDTH = 1024  # elements of a program
ONE_OF_2_32 = tl.constexpr(2.0**-32)


@triton.jit
def _ratios_kernel(scales, levels, buckets, ratios, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Levels in one unit of each bucket."""
    bucket = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    scale = tl.load(scales + bucket, mask=bucket < buckets, other=0).to(tl.float64)
    positive = scale > 0
    ratio = tl.cast(levels, tl.float64) / tl.where(positive, scale, 1)
    tl.store(ratios + bucket, tl.where(positive, ratio, 0), mask=bucket < buckets)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "levels", "negative"])
def _quantize_kernel(  # type: ignore[no-untyped-def]
    key, first, step, source, x, n, bucket, ratios, levels, negative, codes, LONG: tl.constexpr, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    inside = at < n
    v = tl.load(x + at, mask=inside, other=0)
    ratio = tl.load(ratios + bucket_of(start, place, bucket, LONG), mask=inside, other=0)
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WIDTH).to(tl.float64) * ONE_OF_2_32
    exact = tl.abs(v.to(tl.float64)) * ratio
    exact = tl.where(exact > levels, tl.cast(levels, tl.float64), exact) + uniform
    level = tl.where(exact == exact, exact, 0).to(tl.int32)
    code = tl.where((v < 0) & (level > 0), level + negative, level)
    tl.store(codes + at, code.to(tl.uint8), mask=inside)


def quantize(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, x: Tensor, bucket: int, scales: Tensor,
    levels: int, negative: int, work: Tensor | None, codes: Tensor,
) -> None:  # fmt: skip
    """Code of each element: level floor(min(levels |x| / scale, levels) + u), u uniform in [0, 1).

    schedule, step, source : as in `mpicomp.kernels.gpu.philox.draw_words`. first : index of x[0], a multiple of 16.
    x : float32[n] or float64[n]. bucket : elements that share a scale, counted from x[0]. scales : float32 of each.
    levels : s. negative : s or more. work : not used. codes : uint8[n], overwritten.
    """
    if n := x.numel():
        bucket, buckets = min(int(bucket), n), scales.numel()
        ratios = torch.empty(buckets, dtype=torch.float64, device=x.device)
        _ratios_kernel[(triton.cdiv(buckets, WIDTH),)](scales, int(levels), buckets, ratios, WIDTH, **APART)
        _quantize_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first), int(step), int(source), x, n, bucket, ratios, int(levels), int(negative),
            codes, bucket >= WIDTH, WIDTH, **APART,
        )  # fmt: skip


@triton.jit
def _units_kernel(scales, levels, buckets, units, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one level is worth; 0 where the scale is not finite."""
    bucket = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    scale = tl.load(scales + bucket, mask=bucket < buckets, other=0).to(tl.float64)
    unit = tl.where(scale - scale == 0, scale, 0) / tl.cast(levels, tl.float64)
    tl.store(units + bucket, unit, mask=bucket < buckets)


@triton.jit(do_not_specialize=["levels", "negative"])
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes, n, bucket, units, levels, negative, out, LONG: tl.constexpr, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    place = tl.arange(0, WIDTH)
    at = start + place
    inside = at < n
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    unit = tl.load(units + bucket_of(start, place, bucket, LONG), mask=inside, other=0)
    below = code > negative
    level = tl.minimum(tl.where(below, code - negative, code), levels)
    value = level.to(tl.float64) * tl.where(below, -unit, unit)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def dequantize(codes: Tensor, bucket: int, scales: Tensor, levels: int, negative: int, out: Tensor) -> None:
    """Values of codes, finite whatever the codes. codes : uint8[n]; out : float32[n] or float64[n], overwritten."""
    if n := out.numel():
        bucket, buckets = min(int(bucket), n), scales.numel()
        units = torch.empty(buckets, dtype=torch.float64, device=out.device)
        _units_kernel[(triton.cdiv(buckets, WIDTH),)](scales, int(levels), buckets, units, WIDTH, **APART)
        _dequantize_kernel[(triton.cdiv(n, WIDTH),)](
            codes, n, bucket, units, int(levels), int(negative), out, bucket >= WIDTH, WIDTH, **APART
        )
