"""Elements of vectors: their types, their sums, 16-bit floats, and memory for them.

NumPy has no bfloat16: vectors of it are uint16, and the name of the element type travels next to them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives.annotations import AnyArray, FloatArray

NARROW = ("float16", "bfloat16")
"""Types of 16 bits, which are computed in float32."""
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int32", "int64")
COPIED = (*FLOATS, *INTEGERS, "uint8", "bool", "int8", "int16", "uint16")
"""Types of arrays that are moved and not computed with."""
PAGE = 4096


@cache
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """Return the name of an element type. NumPy takes 10 us to build it."""
    return dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"


@cache
def storage(dtype: str) -> np.dtype[np.generic]:
    """Return NumPy's type for elements of this name."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def aligned_empty(n: int, dtype: DTypeLike, alignment: int = PAGE) -> AnyArray:
    """Return an uninitialized vector that begins at a multiple of `alignment` bytes, as buffers of messages should.

    memcpy, in MPI and in the kernel, is many times slower on some processors where the target's offset in its page is
    1 to 31 bytes more than the source's (seen on AMD Zen 3). A target that begins a page is safe, since vectors and
    pieces of them begin at multiples of at least 16 bytes.
    """
    nbytes = n * np.dtype(dtype).itemsize
    room = np.empty(nbytes + alignment, np.uint8)
    start = -room.ctypes.data % alignment
    return room[start : start + nbytes].view(dtype)


@np.errstate(all="ignore")  # a warning would appear on one rank alone
def add(a: AnyArray, b: AnyArray, out: AnyArray) -> None:
    """Overwrite `out` with a + b; an overflow is infinite."""
    np.add(a, b, out)


def minimum(a: AnyArray, b: AnyArray, out: AnyArray) -> None:
    """Overwrite `out` with the smaller elements; NaN where one of two is NaN, unlike MPI's own."""
    np.minimum(a, b, out=out)


def maximum(a: AnyArray, b: AnyArray, out: AnyArray) -> None:
    """Overwrite `out` with the larger elements; NaN where one of two is NaN, unlike MPI's own."""
    np.maximum(a, b, out=out)


Combine = Callable[[AnyArray, AnyArray, AnyArray], object]
"""Function that combines two vectors of one type into a third, which it overwrites."""

COMBINE: dict[str, Combine] = {"sum": add, "mean": add, "min": minimum, "max": maximum}
"""Functions that combine the vectors of two ranks, by operation."""


def widen(values: FloatArray, dtype: str, out: NDArray[np.float32]) -> None:
    """Convert float16 or bfloat16 (as uint16) to float32. `out` is overwritten."""
    if dtype == "bfloat16":
        np.left_shift(values, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(out, values, casting="unsafe")


def narrow(values: NDArray[np.float32], dtype: str, out: FloatArray) -> None:
    """Convert float32 to float16 or bfloat16 (as uint16), to nearest, ties to even. `out` is overwritten.

    NaN stays NaN. Infinite results raise no warning, which would appear on one rank alone.
    """
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        np.copyto(out, np.where(np.isnan(values), np.uint32(0x7FC0), rounded), casting="unsafe")
    else:
        with np.errstate(over="ignore"):
            np.copyto(out, values, casting="unsafe")


def round_in_place(values: NDArray[np.float32], dtype: str, rounded: FloatArray) -> None:
    """Round float32 values to those of float16 or bfloat16, which are stored in `rounded` too."""
    narrow(values, dtype, rounded)
    widen(rounded, dtype, values)
