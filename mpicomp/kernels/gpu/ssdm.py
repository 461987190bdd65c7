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
from mpicomp.kernels.gpu.bucketed import FLOAT32_MAX
from mpicomp.kernels.gpu.common import APART, LANES, bits_of, fold, number, read, to_words, write
from mpicomp.kernels.gpu.philox import key_of, uniforms
from mpicomp.kernels.gpu.sign import BlockRows, block_of_program
from mpicomp.kernels.gpu.sums import STAGES, TURN, add_columns, add_rows, block_sums, combined, total_of

TWO_31 = tl.constexpr(2147483648.0)
WORDS = 16  # words of a program


@triton.jit(do_not_specialize=["first", "beta", "gain"])
def _squares_kernel(g, momentum, beta, gain, blocks, first, sums, ALIGNED: tl.constexpr):
    begin, end, _, _ = block_of_program(blocks, first, ALIGNED)
    whole = begin + (end - begin) // LANES * LANES
    lanes = tl.zeros([LANES], tl.float64)
    for turn in tl.range(begin, whole, TURN, num_stages=STAGES):
        at = turn + tl.arange(0, TURN)
        lanes = add_rows(lanes, _square(combined(g, momentum, beta, gain, at, at < whole), TURN))
    at = whole + tl.arange(0, LANES)
    rest = _square(combined(g, momentum, beta, gain, at, at < end), LANES)
    total = fold(tl.reshape(lanes, [1, LANES])) + add_columns(tl.zeros([1], tl.float64), rest)
    tl.store(sums + tl.program_id(0) + tl.arange(0, 1), total)


@triton.jit
def _square(x, WIDTH: tl.constexpr):
    wide = x.to(tl.float64)
    return tl.reshape(wide * wide, [1, WIDTH])


def squares_of_blocks(
    g: Tensor, momentum: Tensor | None, beta: Any, gain: Any, blocks: BlockRows, sums: Tensor
) -> None:
    """Compute the CPU's `squares` for blocks of many tensors, in one launch; blocks : as in `sign.encode_blocks`."""
    if blocks.n_blocks:
        own, new = (None, None) if momentum is None else (bits_of(beta, g.dtype), bits_of(gain, g.dtype))
        _squares_kernel[(blocks.n_blocks,)](
            g, momentum, own, new, blocks.table, blocks.first, sums, blocks.aligned, num_warps=1, **APART
        )


@triton.jit
def _norm_kernel(sums, blocks, out):
    first = tl.zeros([1], tl.int64)
    root = tl.sqrt(total_of(sums, first, first + blocks))
    beyond = (root > FLOAT32_MAX) & (root < float("inf"))
    tl.store(out + first, tl.where(beyond, FLOAT32_MAX, root).to(tl.float32))


def norm(g: Tensor, out: Tensor) -> None:
    sums = torch.empty(triton.cdiv(g.numel(), streams.BLOCK), dtype=torch.float64, device=g.device)
    if g.numel():
        block_sums(g, None, streams.BLOCK, 1, L2, sums)
    _norm_kernel[(1,)](sums, sums.numel(), out, num_warps=1, **APART)


@triton.jit
def _scale_of(norm):
    """2^31 / norm, float64, of one number in the device's memory; 0 of 0 and NaN."""
    length = tl.load(norm).to(tl.float64)
    known = length > 0
    return tl.where(known, TWO_31 / tl.where(known, length, 1), 0)


@triton.jit(do_not_specialize=["key", "first", "step", "source", "beta", "gain", "scale"])
def _stochastic_signs_kernel(
    key, first, step, source, g, momentum, moved, beta, gain, norm, scale, n, bits, WORDS: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    inside = start + tl.arange(0, WORDS * 64) < n
    uniform = uniforms(key, tl.cast(first, tl.int64) + start, step, source, WORDS * 64).to(tl.float64)
    x = read(g, start, n, WORDS * 64)
    if momentum is not None:
        x = number(beta, x.dtype) * read(momentum, start, n, WORDS * 64) + number(gain, x.dtype) * x
        write(moved, start, n, x, WORDS * 64)
    factor = number(scale, tl.float64) if norm is None else _scale_of(norm)
    below = TWO_31 + x.to(tl.float64) * factor > uniform
    word = start // 64 + tl.arange(0, WORDS)
    tl.store(bits + word, to_words(tl.reshape(below & inside, [WORDS, 64])), mask=word * 64 < n)


def stochastic_signs(
    schedule: NDArray[np.uint64], first: Any, step: Any, source: Any, g: Tensor, momentum: Tensor | None,
    moved: Tensor | None, beta: Any, gain: Any, norm: Any, bits: Tensor,
) -> None:  # fmt: skip
    # The norm may be a tensor of one number, which need not be there yet.
    if n := g.numel():
        there = norm if isinstance(norm, Tensor) else None
        scale = TWO_31.value / float(norm) if there is None and norm > 0 else 0.0
        factors = (None, None) if momentum is None else (bits_of(beta, g.dtype), bits_of(gain, g.dtype))
        _stochastic_signs_kernel[(triton.cdiv(n, 64 * WORDS),)](
            key_of(schedule), int(first), int(step), int(source), g, momentum, moved, *factors,
            there, bits_of(scale, torch.float64), n, bits, WORDS, **APART,
        )  # fmt: skip


@triton.jit(do_not_specialize=["key", "step", "source", "beta", "gain", "first"])
def _stochastic_signs_of_blocks_kernel(
    key, step, source, g, momentum, moved, beta, gain, scales, blocks, first, bits,
    ALIGNED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    begin, end, group, word = block_of_program(blocks, first, ALIGNED)
    factor = tl.load(scales + group)
    for turn in range(0, tl.cdiv(end - begin, WIDTH)):
        start = begin + turn * WIDTH
        uniform = uniforms(key, start, step, source, WIDTH).to(tl.float64)
        x = read(g, start, end, WIDTH)
        if momentum is not None:
            x = number(beta, x.dtype) * read(momentum, start, end, WIDTH) + number(gain, x.dtype) * x
            write(moved, start, end, x, WIDTH)
        below = TWO_31 + x.to(tl.float64) * factor > uniform
        inside = start + tl.arange(0, WIDTH) < end
        place = tl.arange(0, WIDTH // 64)
        packed = to_words(tl.reshape(below & inside, [WIDTH // 64, 64]))
        tl.store(bits + word + turn * (WIDTH // 64) + place, packed, mask=place * 64 < end - start)


def stochastic_signs_of_blocks(
    schedule: NDArray[np.uint64], step: Any, source: Any, g: Tensor, momentum: Tensor | None, moved: Tensor | None,
    beta: Any, gain: Any, scales: Tensor, blocks: BlockRows, bits: Tensor,
) -> None:  # fmt: skip
    """`stochastic_signs` for blocks of many tensors, in one launch.

    scales : float64[groups], 2^31 / norm of each, or 0 where the norm is. blocks : as in `sign.encode_blocks`; bits :
    a block's words lie at the place in its row. The others as in `stochastic_signs`, whole vectors.
    """
    if blocks.n_blocks:
        factors = (None, None) if momentum is None else (bits_of(beta, g.dtype), bits_of(gain, g.dtype))
        _stochastic_signs_of_blocks_kernel[(blocks.n_blocks,)](
            key_of(schedule), int(step), int(source), g, momentum, moved, *factors, scales, blocks.table, blocks.first,
            bits, blocks.aligned, 64 * WORDS, **APART,
        )  # fmt: skip
