"""EF-signSGD's encoding pass, which also computes the residual of the last step from its scales.

Sums have the order that `mpicomp.kernels.cpu.ef_sign` gives them: a program adds up the part of each stretch in its
block by 16 lanes, and the elements in front of the part's first whole word and behind its last one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.gpu.common import (
    APART,
    BLOCK,
    LANES,
    fold,
    numbers_on,
    places_on,
    reaching,
    to_words,
)
from mpicomp.kernels.gpu.sums import STAGES, TURN, add_columns, add_rows

WIDTH = 1024  # elements of a program that settles


@triton.jit
def _without(p, scale):
    """P less the scale where it is 0 or more, plus it elsewhere."""
    return tl.where(p >= 0, p - scale, p + scale)


@triton.jit
def _compensated(g, before, scale, at, inside):
    p = tl.load(before + at, mask=inside, other=0)
    return tl.load(g + at, mask=inside, other=0) + _without(p, scale)


@triton.jit
def _add_one_by_one(rest, g, before, scale, start, stop):
    """Rest, float64[1], plus the magnitudes of some elements, the first one first."""
    for turn in range(start, stop, LANES):
        at = turn + tl.arange(0, LANES)[None, :]
        inside = at < stop
        x = _compensated(g, before, scale, at, inside)
        rest = add_columns(rest, tl.where(inside, tl.abs(x).to(tl.float64), 0))
    return rest


@triton.jit
def _pack_edge(g, before, scale, start, stop, carry, first_word, after, bits):
    """Some elements of one word, of which `carry` has earlier bits; returns the word."""
    word = start // 64
    at = word * 64 + tl.arange(0, 64)
    inside = (at >= start) & (at < stop)
    x = _compensated(g, before, scale, at, inside)
    tl.store(after + at, x, mask=inside)
    packed = to_words(tl.reshape((x >= 0) & inside, [1, 64])) | carry
    tl.store(bits + (word - first_word) + tl.arange(0, 1), packed)
    return tl.sum(packed)


@triton.jit(do_not_specialize=["cut_start", "cut_stop", "low", "high", "first_sum"])
def _compensate_and_pack_kernel(
    g, before, last_scales, starts, stops, firsts, cut_start, cut_stop, low, high, after, bits, sums, first_sum
):
    block = tl.cast(cut_start, tl.int64) // BLOCK + tl.program_id(0)
    begin = block * BLOCK
    end = tl.minimum(begin + BLOCK, cut_stop)
    first_word = cut_start // 64
    carry, carried = tl.full((), 0, tl.int64), tl.full((), -1, tl.int64)  # a word that is not full, and its number
    stretch = reaching(stops, low, high, begin)
    first = tl.load(starts + stretch, mask=stretch < high, other=0)
    while (stretch < high) & (first < end):
        start, stop = tl.maximum(first, begin), tl.minimum(tl.load(stops + stretch), end)
        scale = tl.load(last_scales + stretch)
        # words that the stretch fills, whose elements are loaded 16 bytes at a time, and elements in front and behind
        body, body_stop = (start + 63) // 64 * 64, stop // 64 * 64
        head_stop = tl.minimum(stop, body)
        tail = tl.maximum(head_stop, body_stop)
        # before anything is written, for `after` may be g
        rest = _add_one_by_one(tl.zeros([1], tl.float64), g, before, scale, start, head_stop)
        rest = _add_one_by_one(rest, g, before, scale, tail, stop)
        tl.debug_barrier()
        carry = tl.where(carried == start // 64, carry, 0)
        if start < head_stop:
            carry = _pack_edge(g, before, scale, start, head_stop, carry, first_word, after, bits)
        lanes = tl.zeros([LANES], tl.float64)
        for turn in tl.range(body, body_stop, TURN, num_stages=STAGES):
            at = turn + tl.arange(0, TURN)
            inside = at < body_stop
            x = _compensated(g, before, scale, at, inside)
            tl.store(after + at, x, mask=inside)
            lanes = add_rows(lanes, tl.reshape(tl.where(inside, tl.abs(x), 0), [1, TURN]))
            word = turn // 64 + tl.arange(0, TURN // 64)
            packed = to_words(tl.reshape(x >= 0, [TURN // 64, 64]))
            tl.store(bits + (word - first_word), packed, mask=word * 64 < body_stop)
        if tail < stop:
            carry = _pack_edge(g, before, scale, tail, stop, 0, first_word, after, bits)
        carried = tl.where(stop % 64 == 0, -1, stop // 64)
        one = tl.arange(0, 1)
        place = tl.load(firsts + stretch) + (block - first // BLOCK) - first_sum
        tl.store(sums + place + one, fold(tl.reshape(lanes, [1, LANES])) + rest, mask=one + start < stop)
        stretch += 1
        first = tl.load(starts + stretch, mask=stretch < high, other=0)


def compensate_and_pack(
    g: Tensor, before: Tensor, last_scales: NDArray[Any] | Tensor, starts: NDArray[np.int64] | Tensor,
    stops: NDArray[np.int64] | Tensor, firsts: NDArray[np.int64] | Tensor, cut: tuple[int, int], low: int, high: int,
    streaming: bool, after: Tensor, bits: Tensor, sums: Tensor, first_sum: int = 0,
) -> None:  # fmt: skip
    # `first_sum` is the number of the block whose sum is the first element of `sums`.
    cut_start, cut_stop = int(cut[0]), int(cut[1])
    if cut_start < cut_stop and low < high:
        tables = (places_on(g.device, table) for table in (starts, stops, firsts))
        _compensate_and_pack_kernel[(triton.cdiv(cut_stop - cut_start, streams.BLOCK),)](
            g, before, numbers_on(g.device, last_scales), *tables, cut_start, cut_stop, int(low), int(high), after,
            bits, sums, first_sum, num_warps=1, **APART,
        )  # fmt: skip
