"""Elements of a vector, or of a vector and a residual that is added on the fly, and their magnitudes.

Magnitudes are integers, a float's bits without its sign: NaN and infinity are above all numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(x, residual, at, inside):  # type: ignore[no-untyped-def]
    """Elements of x + residual; 0 outside."""
    v = tl.load(x + at, mask=inside, other=0)
    if residual is not None:
        v = v + tl.load(residual + at, mask=inside, other=0)
    return v


@triton.jit
def sizes(v, inside, mask):  # type: ignore[no-untyped-def]
    """Magnitudes of elements; -1 outside."""
    bits = v.to(tl.int64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.int32, bitcast=True)
    return tl.where(inside, bits & mask, -1)


# A mask that ends anywhere costs accesses of 16 bytes, so only programs at the end of the vector have one.


@triton.jit
def load_rows(x, residual, left, start, column, length, n, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of x + residual, `length` elements each from `start` on; undefined elsewhere.

    left : overwritten with them, or None. start : int64[rows]. column : int32[1, width]. ALIGNED : whether starts and
    length are multiples of 4.
    """
    if ALIGNED:
        start, length = start // 4 * 4, length // 4 * 4  # as they are: so the compiler knows
    at = start[:, None] + column
    inside = column < length
    if tl.max(start) + length <= n:
        v = load(x, residual, at, inside)
        if left is not None:
            tl.store(left + at, v, mask=inside)
    else:
        v = load(x, residual, at, inside & (at < n))
        if left is not None:
            tl.store(left + at, v, mask=inside & (at < n))
    return v
