"""Uniform levels with a wide zero, a scale for each bucket: symbols of a vector, and values of symbols.

A bucket of v[0..n) has sigma^2 = mean v^2 and q = sgn(v) floor(|v| / (step sigma) + 0.4), cut at `most`; the scale
s = sum v q / sum q^2 is rounded to bfloat16, and s q is decoded. Symbols are q + most. Sums are float64, in order.
"""

from __future__ import annotations

import numpy as np
from numba import float32, float64, uint8

from mpicomp.kernels.cpu.kernel import kernel
from mpicomp.kernels.cpu.levels import NAN, _round, _scale


@kernel
def quantize(v, base, starts, lengths, step, most, symbols, scales):
    """Write the symbols and scales of a piece whose first element is number `base`; return whether scales are finite.

    v : float32[n], overwritten with the errors, and zeros between the buckets. starts, lengths : int64[buckets]. step :
    float64. most : int. symbols : uint8[elements of all buckets], overwritten. scales : uint16[buckets], overwritten;
    NaN where v is.
    """
    finite, at, end = True, 0, 0
    for b in range(lengths.size):
        i, n, squares = starts[b] - base, lengths[b], float64(0)
        v[end:i] = 0
        end = i + n
        for k in range(n):
            squares += float64(v[i + k]) * float64(v[i + k])
        sound = squares - squares == 0
        spread = step * np.sqrt(squares / n)
        ratio, top, below = 1 / spread if sound and spread > 0 else float64(0), float64(0), float64(0)
        for k in range(n):
            size = min(np.floor(abs(v[i + k]) * ratio + 0.4), float64(most)) if sound else float64(0)
            symbols[at + k] = uint8(most - size if v[i + k] < 0 else most + size)
            top += abs(float64(v[i + k])) * size if size > 0 else float64(0)
            below += size * size
        bits = _round(top / below if below > 0 else float64(0)) if sound else NAN
        scales[b] = bits
        finite &= bits != NAN
        for k in range(n):
            v[i + k] -= _scale(bits) * float32(np.int64(symbols[at + k]) - most)
        at += n
    v[end:] = 0
    return finite


@kernel
def place(symbols, scales, base, starts, lengths, most, divisor, adds, out):
    """Write decoded values over `divisor`, with zeros between the buckets, or add decoded values with `adds`.

    divisor : float32. out : float32[n] or float64[n], overwritten. Other arguments as in `quantize`. Returns whether
    all scales are finite.
    """
    finite, at, end = True, 0, 0
    for b in range(lengths.size):
        i, n, scale = starts[b] - base, lengths[b], _scale(scales[b])
        finite &= scale * float32(most) - scale * float32(most) == 0
        if not adds:
            out[end:i] = 0
        for k in range(n):
            sent = scale * float32(np.int64(symbols[at + k]) - most)
            if adds:
                out[i + k] += sent
            else:
                out[i + k] = sent / divisor
        at += n
        end = i + n
    if not adds:
        out[end:] = 0
    return finite
