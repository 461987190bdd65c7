"""Whole arrays in the host's memory: allocation, views, conversion, and error feedback in one pass over memory each.

`mpicomp.kernels.gpu.arrays` has the same functions. Types are NumPy's names, or the dtypes of other arrays. `xp` is the
module of functions that have the same name in NumPy and PyTorch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray
from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.simd import LANES, load, splat, store

__all__ = ["compensate", "convert", "divide", "empty", "keep", "view", "xp"]

xp = np


def empty(like: AnyArray, n: int, dtype: DTypeLike) -> AnyArray:
    """Allocate a vector in the memory of `like`."""
    return np.empty(n, dtype)


def view(array: AnyArray, dtype: DTypeLike) -> AnyArray:
    """Return a view of the memory as elements of another type."""
    return array.view(dtype)


def convert(array: AnyArray, dtype: DTypeLike) -> AnyArray:
    """Return the elements as another type, each rounded once; the array itself if it has that type."""
    return array.astype(dtype, copy=False)


def divide(array: AnyArray, divisor: int) -> None:
    """Divide an array in place by a number of its type, rounding once."""
    np.divide(array, array.dtype.type(divisor), out=array)


# Error feedback -------------------------------------------------------------------------------------------------------


@kernel
def compensate(values, residual, alpha, out):
    """Compute out = values + alpha residual.

    values, residual : float32[n] or float64[n]. alpha : scalar like them, or None for 1. out : like them, overwritten.
    """
    for i in range(out.size):
        kept = residual[i]
        if alpha is not None:
            kept = kept * alpha
        out[i] = kept + values[i]


@kernel
def keep(values, sent, residual, beta, out):
    """Compute out = values - sent, plus beta residual if `beta` is given; return whether all of `out` is finite.

    values, sent, residual : float32[n] or float64[n]. beta : scalar like them, or None. out : like them, overwritten.
    """
    whole = out.size // LANES * LANES
    strange = splat(out.dtype.type(0))  # v - v is 0 for finite numbers alone
    for i in range(0, whole, LANES):
        left = load(values, i) - load(sent, i)
        if beta is not None:
            left = load(residual, i) * splat(beta) + left
        strange = strange + (left - left)
        store(out, i, left)
    rest = fold(strange)
    for i in range(whole, out.size):
        left_out = values[i] - sent[i]
        if beta is not None:
            left_out = residual[i] * beta + left_out
        rest += left_out - left_out
        out[i] = left_out
    return rest == 0
