"""Sums of the vectors of a node's ranks, and copies, past the caches where the result is longer than they are."""

from __future__ import annotations

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.simd import LANES, fence, load, put, splat

__all__ = ["add", "copy"]


@kernel
def add(first, second, divisor, streaming, out):
    """Compute out = (first + second) / divisor; return whether all of `out` is finite.

    first, second : float32[n] or float64[n]. divisor : scalar like them, or None for 1. streaming : bool; `out` then
    begins at a multiple of 32 bytes. out : like them, overwritten; may be `first`.
    """
    whole = out.size // LANES * LANES
    strange = splat(out.dtype.type(0))  # v - v is 0 for finite numbers alone
    for i in range(0, whole, LANES):
        total = load(first, i) + load(second, i)
        if divisor is not None:
            total = total / splat(divisor)
        strange = strange + (total - total)
        put(out, i, total, streaming)
    if streaming:
        fence()
    rest = fold(strange)
    for i in range(whole, out.size):
        last = first[i] + second[i]
        if divisor is not None:
            last = last / divisor
        rest += last - last
        out[i] = last
    return rest == 0


@kernel
def copy(values, streaming, out):
    """Copy float32[n] or float64[n]; streaming and out as in `add`."""
    whole = out.size // LANES * LANES
    for i in range(0, whole, LANES):
        put(out, i, load(values, i), streaming)
    if streaming:
        fence()
    for i in range(whole, out.size):
        out[i] = values[i]
