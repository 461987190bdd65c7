"""Allocation, views and conversion of arrays in the host's memory, for codecs that serve host and device.

`mpicomp.kernels.gpu.arrays` has the same functions. Types are NumPy's names, or the dtypes of other arrays. `xp` is the
module of functions that have the same name in NumPy and PyTorch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray

__all__ = ["convert", "divide", "empty", "view", "xp"]

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
