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
