"""What feedback adds before a codec, and keeps of what the codec left out: one pass over memory each."""

from __future__ import annotations

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.lanes import fold
from mpicomp.kernels.cpu.simd import LANES, load, splat, store


@kernel
def compensate(values, residual, alpha, out):  # type: ignore[no-untyped-def]
    """out = values + alpha residual.

    values, residual : float32[n] or float64[n]. alpha : scalar like them, or None for 1. out : like them, overwritten.
    """
    for i in range(out.size):
        kept = residual[i]
        if alpha is not None:
            kept = kept * alpha
        out[i] = kept + values[i]


@kernel
def keep(values, sent, residual, beta, out):  # type: ignore[no-untyped-def]
    """out = values - sent, and with `beta` that added to beta residual.

    values, sent, residual : float32[n] or float64[n]. beta : scalar like them, or None. out : like them, overwritten.

    Returns
    -------
    bool
        Whether all of `out` is finite.
    """
    whole = out.size // LANES * LANES
    strange = splat(out.dtype.type(0))  # the difference of a number and itself is 0, of NaN and infinity it is not
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
