"""What feedback adds before a codec, and keeps of what the codec left out: one pass over memory each."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import (
    APART,
    bits_of,
    finite_flag,
    is_set,
    number,
    read,
    write,
)

WIDTH = 1024  # elements of a program


@triton.jit(do_not_specialize=["alpha"])
def _compensate_kernel(  # type: ignore[no-untyped-def]
    values, residual, n, alpha, out, SCALED: tl.constexpr, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    kept = read(residual, start, n, WIDTH)
    if SCALED:
        kept = kept * number(alpha, kept.dtype)
    write(out, start, n, kept + read(values, start, n, WIDTH), WIDTH)


def compensate(values: Tensor, residual: Tensor, alpha: Any, out: Tensor) -> None:
    """out = values + alpha residual.

    values, residual : float32[n] or float64[n]. alpha : scalar like them, or None for 1. out : like them, overwritten.
    """
    if n := out.numel():
        scale = 0 if alpha is None else bits_of(alpha, out.dtype)
        _compensate_kernel[(triton.cdiv(n, WIDTH),)](values, residual, n, scale, out, alpha is not None, WIDTH, **APART)


@triton.jit(do_not_specialize=["beta"])
def _keep_kernel(  # type: ignore[no-untyped-def]
    values, sent, residual, n, beta, out, finite, SCALED: tl.constexpr, WIDTH: tl.constexpr
):
    """`finite` becomes 0 where a part of the residual is not finite."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    left = read(values, start, n, WIDTH) - read(sent, start, n, WIDTH)
    if SCALED:
        left = read(residual, start, n, WIDTH) * number(beta, left.dtype) + left
    write(out, start, n, left, WIDTH)
    tl.store(finite, 0, mask=tl.max(((left - left != 0) & (start + tl.arange(0, WIDTH) < n)).to(tl.int32)) > 0)


def keep(values: Tensor, sent: Tensor, residual: Tensor, beta: Any, out: Tensor) -> Tensor:
    """out = values - sent, and with `beta` that added to beta residual.

    values, sent, residual : float32[n] or float64[n]. beta : scalar like them, or None. out : like them, overwritten.

    Returns
    -------
    bool[]
        Whether all of `out` is finite.
    """
    finite = finite_flag(out)
    if n := out.numel():
        scale = 0 if beta is None else bits_of(beta, out.dtype)
        _keep_kernel[(triton.cdiv(n, WIDTH),)](
            values, sent, residual, n, scale, out, finite, beta is not None, WIDTH, **APART
        )
    return is_set(finite)
