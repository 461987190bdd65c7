"""Error feedback: adding the residual before a codec, and computing the next residual. One pass over memory each."""

from __future__ import annotations

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.simd import LANES, load, splat, store


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
