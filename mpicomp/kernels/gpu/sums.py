"""Sums of blocks of 4096 elements, and of their sums, in the CPU's order.

A block is added up in 16 lanes, element i in lane i mod 16. The elements behind its last whole 16 are added one by one,
and so are sums of blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.cpu.bucketed import L2
from mpicomp.kernels.gpu.common import APART, BLOCK, LANES, fold

SQUARES = tl.constexpr(L2)
# A program is one warp: its turns follow one another, and each would last as long as memory takes to answer if the next
# ones were not loaded meanwhile. So a launch of few blocks takes 16 turns of 256 elements, not 64 of 64.
TURN = tl.constexpr(256)
STAGES = tl.constexpr(4)  # turns under way
SHORT = 512  # elements of a bucket of which several share a program
TOTALS = 32  # stretches of a program that adds up sums of blocks
FEW = 64  # sums of a bucket's blocks that a program which needs their total adds up itself


@triton.jit
def _add_halves(total, columns):
    """Add the columns one after the other; each split halves them."""
    low, high = tl.split(columns)
    if len(low.shape) == 1:
        return total + low + high
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return _add_halves(_add_halves(total, low), high)


@triton.jit
def add_columns(total, columns):
    """Add 16 columns to the totals, one after the other."""
    rows: tl.constexpr = columns.shape[0]
    return _add_halves(total, tl.permute(tl.reshape(columns, [rows, 2, 2, 2, 2]), (0, 4, 3, 2, 1)))


@triton.jit
def total_of(sums, first, stop):
    """sums[first] + sums[first + 1] + ... of each row. first, stop : int64[rows]; sums, result : float64."""
    total = (first * 0).to(tl.float64)
    for column in range(0, tl.max(stop - first), LANES):
        at = first[:, None] + (column + tl.arange(0, LANES)[None, :])
        total = add_columns(total, tl.load(sums + at, mask=at < stop[:, None], other=0))
    return total


@triton.jit
def combined(x, other, at, inside):
    """Elements of x, or of x + other; 0 outside."""
    v = tl.load(x + at, mask=inside, other=0)
    if other is not None:
        v += tl.load(other + at, mask=inside, other=0)
    return v


@triton.jit
def _measured(v, KIND: tl.constexpr):
    wide = v.to(tl.float64)
    return wide * wide if KIND == SQUARES else tl.abs(wide)


@triton.jit
def block_at(task, blocks, bucket, n):
    """Start, end of the whole 16 elements, and stop of block `task`, int64, of buckets that have `blocks` each."""
    before = task % blocks * BLOCK
    start = tl.minimum(task // blocks * bucket + before, n)
    stop = tl.minimum(start + tl.minimum(bucket - before, BLOCK), n)
    return start, start + (stop - start) // LANES * LANES, stop


@triton.jit
def add_rows(lanes, turn):
    """Lanes, float64[blocks * 16], plus the 16 rows of each block's turn, [blocks, 256], the first row first."""
    blocks: tl.constexpr = turn.shape[0]
    rows = tl.permute(tl.reshape(turn, [blocks, 16, LANES]), (0, 2, 1))
    return add_columns(lanes, tl.reshape(rows, [blocks * LANES, 16]).to(tl.float64))


def blocks_of_program(bucket: int) -> int:
    """Return how many blocks a program sums."""
    return 4 if bucket <= SHORT else 1


@triton.jit
def _block_sums_kernel(x, other, n, bucket, blocks, tasks, sums, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    task = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    start, whole, stop = block_at(task, blocks, bucket, n)
    lanes = tl.zeros([BLOCKS * LANES], tl.float64)
    for first in tl.range(0, tl.max(whole - start), TURN, num_stages=STAGES):
        at = start[:, None] + (first + tl.arange(0, TURN)[None, :])
        lanes = add_rows(lanes, _measured(combined(x, other, at, at < whole[:, None]), KIND))
    at = whole[:, None] + tl.arange(0, LANES)[None, :]
    columns = _measured(combined(x, other, at, at < stop[:, None]), KIND)
    totals = fold(tl.reshape(lanes, [BLOCKS, LANES])) + add_columns(tl.zeros([BLOCKS], tl.float64), columns)
    tl.store(sums + task, totals, mask=task < tasks)


def block_sums(x: Tensor, other: Tensor | None, bucket: int, blocks: int, kind: int, sums: Tensor) -> None:
    """Sums of squares (L2) or magnitudes (L1) of each block of each bucket of x + other; 0 of blocks that are empty.

    x : float32[n] or float64[n]. other : like x, or None. bucket : elements. blocks : of a bucket, ceil(bucket / 4096).
    sums : float64[buckets * blocks], overwritten.
    """
    tasks, of_program = sums.numel(), blocks_of_program(bucket)
    _block_sums_kernel[(triton.cdiv(tasks, of_program),)](
        x, other, x.numel(), bucket, blocks, tasks, sums, kind, of_program, num_warps=1, **APART
    )


@triton.jit
def _totals_kernel(sums, blocks, buckets, totals, ROWS: tl.constexpr):
    bucket = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.minimum(bucket, buckets) * blocks
    stop = tl.minimum(bucket + 1, buckets) * blocks
    tl.store(totals + bucket, total_of(sums, first, stop), mask=bucket < buckets)


def add_blocks(sums: Tensor, blocks: int, totals: Tensor) -> None:
    """Add up the sums of each bucket's blocks. sums : float64[buckets * blocks]; totals : float64, overwritten."""
    buckets = totals.numel()
    _totals_kernel[(triton.cdiv(buckets, TOTALS),)](sums, blocks, buckets, totals, TOTALS, num_warps=1, **APART)


def few_sums(sums: Tensor, blocks: int, rows: int) -> tuple[Tensor, int]:
    """Add up the sums of each bucket's blocks, unless programs with `rows` totals do; returns sums, those of a bucket.

    sums : float64[buckets * blocks].
    """
    if blocks == 1 or (blocks <= FEW and rows == 1):
        return sums, blocks
    totals = torch.empty(sums.numel() // blocks, dtype=torch.float64, device=sums.device)
    add_blocks(sums, blocks, totals)
    return totals, 1


def sums_of_buckets(
    x: Tensor, other: Tensor | None, bucket: int, buckets: int, kind: int, rows: int
) -> tuple[Tensor, int]:
    """Return sums of squares or magnitudes of x + other for `total_at`: a few of each bucket, and how many of each."""
    blocks = -(-bucket // streams.BLOCK)
    sums = torch.empty(buckets * blocks, dtype=torch.float64, device=x.device)
    block_sums(x, other, bucket, blocks, kind, sums)
    return few_sums(sums, blocks, rows)


@triton.jit
def total_at(sums, blocks, number, buckets):
    """Total of each bucket, [rows], given the sums that `few_sums` returns; of one row several sums."""
    if number.shape[0] == 1:
        first = tl.minimum(number, buckets) * blocks
        return total_of(sums, first, tl.minimum(number + 1, buckets) * blocks)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        # -0 becomes 0, as by adding to 0
        return tl.load(sums + number, mask=number < buckets, other=0) + 0.0
