"""Whole tensors: allocation, views, conversion, error feedback. See `mpicomp.kernels.cpu.arrays`.

Tensors hold the bits of unsigned integers of more than 8 bits in signed ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, bits_of, call_with_flag, finite_flag, is_set, launch, number, read, write

__all__ = ["call_with_flag", "compensate", "convert", "divide", "empty", "keep", "view", "xp"]

WIDTH = 1024  # elements of a program

xp = torch


def _type(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found: torch.dtype = getattr(torch, dtype if dtype == "uint8" else dtype.removeprefix("u"))
    return found


def empty(like: Tensor, n: int, dtype: str | torch.dtype) -> Tensor:
    return torch.empty(n, dtype=_type(dtype), device=like.device)


def view(array: Tensor, dtype: str | torch.dtype) -> Tensor:
    return array.view(_type(dtype))


def convert(array: Tensor, dtype: str | torch.dtype) -> Tensor:
    return array.to(_type(dtype))


@lru_cache(maxsize=64)
def _number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def divide(array: Tensor, divisor: int) -> None:
    # By a number of the host's PyTorch would multiply with its reciprocal, which rounds twice.
    array.div_(_number(divisor, array.dtype, array.device))


# Error feedback: one pass over memory each ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["alpha"])
def _compensate_kernel(values, residual, n, alpha, out, SCALED: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    kept = read(residual, start, n, WIDTH)
    if SCALED:
        kept = kept * number(alpha, kept.dtype)
    write(out, start, n, kept + read(values, start, n, WIDTH), WIDTH)


def compensate(values: Tensor, residual: Tensor, alpha: Any, out: Tensor) -> None:
    if n := out.numel():
        scale = 0 if alpha is None else bits_of(alpha, out.dtype)
        programs, is_scaled = triton.cdiv(n, WIDTH), alpha is not None
        launch(_compensate_kernel, programs, values, residual, n, scale, out, is_scaled, WIDTH, **APART)


@triton.jit(do_not_specialize=["beta"])
def _keep_kernel(values, sent, residual, n, beta, out, finite, SCALED: tl.constexpr, WIDTH: tl.constexpr):
    """`finite` becomes 0 where a part of the residual is not finite."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    left = read(values, start, n, WIDTH) - read(sent, start, n, WIDTH)
    if SCALED:
        left = read(residual, start, n, WIDTH) * number(beta, left.dtype) + left
    write(out, start, n, left, WIDTH)
    tl.store(finite, 0, mask=tl.max(((left - left != 0) & (start + tl.arange(0, WIDTH) < n)).to(tl.int32)) > 0)


def keep(values: Tensor, sent: Tensor, residual: Tensor, beta: Any, out: Tensor) -> Tensor:
    finite = finite_flag(out)
    if n := out.numel():
        scale = 0 if beta is None else bits_of(beta, out.dtype)
        _keep_kernel[(triton.cdiv(n, WIDTH),)](
            values, sent, residual, n, scale, out, finite, beta is not None, WIDTH, **APART
        )
    return is_set(finite)
