"""float16 and bfloat16 as uint16: rounding to nearest, ties to even, and back.

The loops work on bits, as not every processor has instructions for these types, and compilers vectorize them anywhere.
"""

from __future__ import annotations

import numpy as np
from numba import float32, int32, njit, uint16, uint32

from mpicomp.kernels.cpu.kernel import kernel

_REBIAS = np.uint32(127 - 15 << 23)  # difference of the exponents of a number as float32 and as float16
_INFINITY = np.uint32(0x7F800000)  # of float32
_INFINITY_16 = np.uint16(0x7C00)
_LEAST_NORMAL = np.uint32(127 - 14 << 23)  # of float16, as float32
_LEAST_NORMAL_16 = np.uint16(0x0400)
_UNITS = np.float32(2**24)  # of float16's subnormal numbers in 1
_UNIT = np.float32(2**-24)
_WHOLE = np.float32(2**23)  # adding it to a smaller number, and subtracting it again, rounds to whole numbers


@njit(nogil=True, inline="always")
def _to_float16(x):
    bits = np.float32(x).view(np.uint32)
    size = uint32(bits & uint32(0x7FFFFFFF))
    # numbers too large for a normal one become infinity, NaN stays NaN
    carried = uint32(size - _REBIAS + uint32(0xFFF) + ((size >> uint32(13)) & uint32(1)))
    code = min(uint32(carried >> uint32(13)), uint32(0x7C00))
    code = uint32(0x7E00) if size > _INFINITY else code
    # min() keeps the conversion to an integer in range where its result is not used
    few = int32((min(abs(x), float32(1)) * _UNITS + _WHOLE) - _WHOLE)
    code = uint32(few) if size < _LEAST_NORMAL else code
    return uint16(code | (bits >> uint32(16) & uint32(0x8000)))


@njit(nogil=True, inline="always")
def _to_bfloat16(x):
    bits = np.float32(x).view(np.uint32)
    rounded = uint32(uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))
    return uint16(rounded) if uint32(bits & uint32(0x7FFFFFFF)) <= _INFINITY else uint16(0x7FC0)


@njit(nogil=True, inline="always")
def _from_float16(code):
    size = uint16(code & uint16(0x7FFF))
    bits = uint32((uint32(size) << uint32(13)) + _REBIAS)
    bits = uint32(bits + _REBIAS) if size >= _INFINITY_16 else bits
    few = np.float32(float32(int32(size)) * _UNIT).view(np.uint32)
    bits = few if size < _LEAST_NORMAL_16 else bits
    return np.uint32(bits | (uint32(code & uint16(0x8000)) << uint32(16))).view(np.float32)


@njit(nogil=True, inline="always")
def _from_bfloat16(code):
    return np.uint32(uint32(code) << uint32(16)).view(np.float32)


@kernel
def narrow(values, bfloat16, out):
    """Round to 16 bits; float64 numbers are rounded to float32 before.

    values : float32[n] or float64[n]. bfloat16 : bool, else float16. out : uint16[n], overwritten.

    Returns
    -------
    bool
        Whether all of `out` is finite.
    """
    largest = uint16(0)
    if bfloat16:
        for i in range(out.size):
            code = _to_bfloat16(float32(values[i]))
            out[i] = code
            largest = max(largest, uint16(code & uint16(0x7FFF)))
        return largest < uint16(0x7F80)
    for i in range(out.size):
        code = _to_float16(float32(values[i]))
        out[i] = code
        largest = max(largest, uint16(code & uint16(0x7FFF)))
    return largest < _INFINITY_16


@kernel
def widen(codes, bfloat16, out):
    """Invert `narrow`, exactly. codes : uint16[n]. out : float32[n] or float64[n], overwritten."""
    if bfloat16:
        for i in range(out.size):
            out[i] = _from_bfloat16(codes[i])
    else:
        for i in range(out.size):
            out[i] = _from_float16(codes[i])


@kernel
def add(codes, bfloat16, sums):
    """Add the numbers that `widen` would write to `sums`."""
    if bfloat16:
        for i in range(sums.size):
            sums[i] += _from_bfloat16(codes[i])
    else:
        for i in range(sums.size):
            sums[i] += _from_float16(codes[i])
