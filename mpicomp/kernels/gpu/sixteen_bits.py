"""float16 and bfloat16 as int16 bit patterns: rounding to nearest, ties to even, and back.

The kernels work on bits, as the CPU's do: every GPU then gives the same NaN and subnormal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, finite_flag, is_set, read, write

REBIAS = tl.constexpr(127 - 15 << 23)  # difference of the exponents of a number as float32 and as float16
INFINITY = tl.constexpr(0x7F800000)  # of float32
INFINITY_16 = tl.constexpr(0x7C00)
LEAST_NORMAL = tl.constexpr(127 - 14 << 23)  # of float16, as float32
LEAST_NORMAL_16 = tl.constexpr(0x0400)
UNITS = tl.constexpr(2.0**24)  # of float16's subnormal numbers in 1
UNIT = tl.constexpr(2.0**-24)
WHOLE = tl.constexpr(2.0**23)  # adding it to a smaller number, and subtracting it again, rounds to whole numbers
WIDTH = 1024  # elements of a program


@triton.jit
def _to_float16(value):
    """Bits of the nearest float16, uint32."""
    x = value.to(tl.float32)
    size = x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    # numbers too large for a normal one become infinity, NaN stays NaN
    carried = size - REBIAS + 0xFFF + ((size >> 13) & 1)
    code = tl.where(size > INFINITY, 0x7E00, tl.minimum(carried >> 13, 0x7C00))
    few = (tl.where(size < LEAST_NORMAL, tl.abs(x), 0) * UNITS + WHOLE) - WHOLE
    code = tl.where(size < LEAST_NORMAL, few.to(tl.uint32), code)
    # the sign of the value itself: rounding may take it from NaN
    if value.dtype == tl.float64:
        negative = value.to(tl.int64, bitcast=True) < 0
    else:
        negative = value.to(tl.int32, bitcast=True) < 0
    return tl.where(negative, code | 0x8000, code)


@triton.jit
def _to_bfloat16(value):
    """Bits of the nearest bfloat16, uint32."""
    bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) <= INFINITY, rounded, 0x7FC0)


@triton.jit
def to_float32(codes, BFLOAT16: tl.constexpr):
    """The float32 numbers of int16 codes."""
    code = codes.to(tl.uint16, bitcast=True).to(tl.uint32)
    if BFLOAT16:
        return (code << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        size = code & 0x7FFF
        bits = (size << 13) + tl.where(size >= INFINITY_16, 2 * REBIAS, REBIAS)
        few = (size.to(tl.float32) * UNIT).to(tl.uint32, bitcast=True)
        bits = tl.where(size < LEAST_NORMAL_16, few, bits.to(tl.uint32))
        return (bits | ((code & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _narrow_kernel(values, n, out, finite, BFLOAT16: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    value = read(values, start, n, WIDTH)
    if BFLOAT16:
        code = _to_bfloat16(value)
        strange = (code & 0x7FFF) >= 0x7F80
    else:
        code = _to_float16(value)
        strange = (code & 0x7FFF) >= INFINITY_16
    write(out, start, n, code.to(tl.uint16).to(tl.int16, bitcast=True), WIDTH)
    tl.store(finite, 0, mask=tl.max(strange.to(tl.int32)) > 0)


def narrow(values: Tensor, bfloat16: bool, out: Tensor) -> Tensor:
    finite = finite_flag(out)
    if n := out.numel():
        _narrow_kernel[(triton.cdiv(n, WIDTH),)](values, n, out, finite, bool(bfloat16), WIDTH, **APART)
    return is_set(finite)


@triton.jit
def _widen_kernel(codes, n, out, BFLOAT16: tl.constexpr, ADD: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    value = to_float32(read(codes, start, n, WIDTH), BFLOAT16).to(out.dtype.element_ty)
    if ADD:
        value = read(out, start, n, WIDTH) + value
    write(out, start, n, value, WIDTH)


def widen(codes: Tensor, bfloat16: bool, out: Tensor) -> None:
    if n := out.numel():
        _widen_kernel[(triton.cdiv(n, WIDTH),)](codes, n, out, bool(bfloat16), False, WIDTH, **APART)


def add(codes: Tensor, bfloat16: bool, sums: Tensor) -> None:
    if n := sums.numel():
        _widen_kernel[(triton.cdiv(n, WIDTH),)](codes, n, sums, bool(bfloat16), True, WIDTH, **APART)
