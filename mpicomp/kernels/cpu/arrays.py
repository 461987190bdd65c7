"""Arrays in the host's memory as codecs make, view and convert them; `mpicomp.kernels.gpu.arrays` has the same.

Types are given by NumPy's names, or as those of other arrays. `xp` has the functions that NumPy and PyTorch call alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["convert", "divide", "empty", "view", "xp"]

xp = np


def empty(like: NDArray[Any], n: int, dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """A vector where `like` is."""
    return np.empty(n, dtype)


def view(array: NDArray[Any], dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """The same memory as elements of another type."""
    return array.view(dtype)


def convert(array: NDArray[Any], dtype: str | np.dtype[Any]) -> NDArray[Any]:
    """Elements as another type, each rounded once; the array itself if it has that."""
    return array.astype(dtype, copy=False)


def divide(array: NDArray[Any], divisor: int) -> None:
    """Divide by a number of the array's type, rounding once. `array` is overwritten."""
    np.divide(array, array.dtype.type(divisor), out=array)
