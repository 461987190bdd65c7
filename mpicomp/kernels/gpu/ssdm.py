"""SSDM's two passes: the norm, with momentum or without, and stochastic signs, 32 random bits per element."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.cpu.bucketed import L2
from mpicomp.kernels.gpu.common import APART, bits_of, number, to_words
from mpicomp.kernels.gpu.philox import key_of, uniforms
from mpicomp.kernels.gpu.sums import block_sums, combined

TWO_31 = tl.constexpr(2147483648.0)
WORDS = 16  # words of a program


def squares(g: Tensor, momentum: Tensor | None, beta: Any, gain: Any, sums: Tensor) -> None:
    """Sum of squares of beta momentum + gain g per block of 4096, in float64; nothing else is written.

    g : float32[n] or float64[n]. momentum : like g, or None: of g itself. beta, gain : scalars like g.
    sums : float64[ceil(n / 4096)], overwritten.
    """
    if g.numel():
        own, new = (None, None) if momentum is None else (bits_of(beta, g.dtype), bits_of(gain, g.dtype))
        block_sums(g, momentum, own, new, streams.BLOCK, 1, L2, sums)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "beta", "gain", "scale"])
def _stochastic_signs_kernel(  # type: ignore[no-untyped-def]
    key, first, step, source, g, momentum, moved, beta, gain, scale, n, bits, WORDS: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    at = start + tl.arange(0, WORDS * 64)
    inside = at < n
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WORDS * 64).to(tl.float64)
    x = combined(g, momentum, beta, gain, at, inside)
    if momentum is not None:
        tl.store(moved + at, x, mask=inside)
    below = TWO_31 + x.to(tl.float64) * number(scale, tl.float64) > uniform
    word = start // 64 + tl.arange(0, WORDS)
    tl.store(bits + word, to_words(tl.reshape(below & inside, [WORDS, 64])), mask=word * 64 < n)


def stochastic_signs(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, g: Tensor, momentum: Tensor | None,
    moved: Tensor | None, beta: Any, gain: Any, norm: Any, bits: Tensor,
) -> None:  # fmt: skip
    """moved = beta momentum + gain g; bit i = 1 with probability 1/2 + x[i] / (2 norm), to 2^-32, x = moved.

    schedule, step, source : as in `philox.draw_words`; element e of a group of 512 takes 32-bit word
    e mod 16 of draw e div 16. first : index of g[0] in its vector, a multiple of 64. g : float32[n] or float64[n].
    momentum : like g, or None: x is g itself. moved : like momentum, overwritten. norm : float64; 0 gives fair coins.
    bits : int64[ceil(n / 64)], overwritten.
    """
    if n := g.numel():
        scale = TWO_31.value / float(norm) if norm > 0 else 0.0
        factors = (None, None) if momentum is None else (bits_of(beta, g.dtype), bits_of(gain, g.dtype))
        _stochastic_signs_kernel[(triton.cdiv(n, 64 * WORDS),)](
            key_of(schedule), int(first), int(step), int(source), g, momentum, moved, *factors,
            bits_of(scale, torch.float64), n, bits, WORDS, **APART,
        )  # fmt: skip
