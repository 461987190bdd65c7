"""Few elements of a vector: picked out, put back, drawn.

Writing to places that occur twice has the CPU's result, that of one element after the other. Places that are not
damaged ascend: kernels look whether they do, and go through them in order only where they do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, bit_at, bits_of, finite_flag, is_set, number, read, write
from mpicomp.kernels.gpu.philox import key_of, uniforms

WIDTH = 1024  # elements of a program
TILE = 2048  # elements of a program that counts bits
IN_ORDER = 64  # elements that a program writes at once where order matters

# Places of elements -------------------------------------------------------------------------------------------------


@triton.jit
def _expand_kernel(indices, k, chunk, keep, start, stop, places, WIDTH: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    index = tl.load(indices + j, mask=j < k, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    place = start + j // keep * chunk + tl.minimum(index, chunk - 1)
    tl.store(places + j, tl.minimum(place, stop - 1), mask=j < k)


def expand(indices: Tensor, chunk: int, keep: int, start: int, stop: int, places: Tensor) -> None:
    if k := indices.numel():
        grid = (triton.cdiv(k, WIDTH),)
        _expand_kernel[grid](indices, k, int(chunk), int(keep), int(start), int(stop), places, WIDTH, **APART)


@triton.jit(do_not_specialize=["key", "first", "step", "source"])
def _draw_strata_kernel(key, first, step, source, chunk, start, stop, places, k, WIDTH: tl.constexpr):
    element = tl.cast(first, tl.int64) // 16 * 16 + tl.program_id(0).to(tl.int64) * WIDTH
    word = uniforms(key, element, step, source, WIDTH).to(tl.uint64)
    j = element - first + tl.arange(0, WIDTH)
    base = start + j * chunk
    length = tl.minimum(stop - base, chunk).to(tl.uint64)
    tl.store(places + j, base + ((word * length) >> 32).to(tl.int64), mask=(j >= 0) & (j < k))


def draw_strata(
    schedule: NDArray[np.uint64], first: int, step: Any, source: Any, chunk: int, start: int, stop: int, places: Tensor
) -> None:
    if k := places.numel():
        counters = key_of(schedule), int(first), int(step), int(source)
        grid = (triton.cdiv(int(first) % 16 + k, WIDTH),)
        _draw_strata_kernel[grid](*counters, int(chunk), int(start), int(stop), places, k, WIDTH, **APART)


# A vector and its residual ------------------------------------------------------------------------------------------


@triton.jit
def _finite_sum_kernel(x, residual, left, n, finite, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    v = read(x, start, n, WIDTH) + read(residual, start, n, WIDTH)
    if left is not None:
        write(left, start, n, v, WIDTH)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def finite_sum(x: Tensor, residual: Tensor, left: Tensor | None) -> Tensor:
    finite = finite_flag(x)
    if n := x.numel():
        _finite_sum_kernel[(triton.cdiv(n, WIDTH),)](x, residual, left, n, finite, WIDTH, **APART)
    return is_set(finite)


@triton.jit(do_not_specialize=["past"])
def _pick_kernel(x, residual, places, k, past, values, kept, WIDTH: tl.constexpr):
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = j < k
    place = tl.load(places + j, mask=inside, other=0)
    old = tl.load(residual + place, mask=inside, other=0)
    v = tl.load(x + place, mask=inside, other=0) + old
    tl.store(values + j, v, mask=inside)
    if kept is not None:
        tl.store(kept + j, number(past, v.dtype) * old, mask=inside)


def pick(x: Tensor, residual: Tensor, places: Tensor, past: Any, values: Tensor, kept: Tensor | None) -> None:
    if k := places.numel():
        scale, kept = bits_of(0 if past is None else past, x.dtype), None if past is None else kept
        _pick_kernel[(triton.cdiv(k, WIDTH),)](x, residual, places, k, scale, values, kept, WIDTH, **APART)


@triton.jit(do_not_specialize=["past", "part"])
def _remember_kernel(x, residual, n, past, part, out, SCALED: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    old = read(residual, start, n, WIDTH)
    v = read(x, start, n, WIDTH) + old
    if SCALED:
        v = number(past, v.dtype) * old + number(part, v.dtype) * v
    write(out, start, n, v, WIDTH)


@triton.jit
def _replace_kernel(places, k, start, kept, out, WIDTH: tl.constexpr):
    """out[places - start] = kept, or 0."""
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    place = tl.load(places + j, mask=j < k, other=0) - start
    if kept is None:
        tl.store(out + place, tl.zeros((WIDTH,), out.dtype.element_ty), mask=j < k)
    else:
        tl.store(out + place, tl.load(kept + j, mask=j < k), mask=j < k)


def remember(
    x: Tensor | None, residual: Tensor, past: Any, part: Any, start: int, places: Tensor, kept: Tensor | None,
    out: Tensor,
) -> None:  # fmt: skip
    # `kept` is as `pick` leaves it, so places that occur twice have the same value.
    if x is not None and (n := x.numel()):
        scales = (0, 0) if past is None else (bits_of(past, x.dtype), bits_of(part, x.dtype))
        _remember_kernel[(triton.cdiv(n, WIDTH),)](x, residual, n, *scales, out, past is not None, WIDTH, **APART)
    if k := places.numel():
        _replace_kernel[(triton.cdiv(k, WIDTH),)](places, k, int(start), kept, out, WIDTH, **APART)


@triton.jit
def _disorder_kernel(places, k, disorder, WIDTH: tl.constexpr):
    """Set `disorder` to 1 where a place is not above the one before it."""
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (j > 0) & (j < k)
    here, before = tl.load(places + j, mask=inside, other=1), tl.load(places + j - 1, mask=inside, other=0)
    tl.store(disorder, 1, mask=tl.max((here <= before).to(tl.int32)) > 0)


@triton.jit
def _put_kernel(values, places, k, disorder, out, WIDTH: tl.constexpr, IN_ORDER: tl.constexpr):
    """Write all at once, or where places are out of order one program alone, the last of equal places last."""
    if tl.load(disorder) == 0:
        j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        tl.store(out + tl.load(places + j, mask=j < k, other=0), tl.load(values + j, mask=j < k), mask=j < k)
    elif tl.program_id(0) == 0:
        column = tl.arange(0, IN_ORDER).to(tl.int64)
        for first in range(0, k, IN_ORDER):
            some = first + column < k
            place = tl.load(places + first + column, mask=some, other=-1)
            later = (place[:, None] == place[None, :]) & (column[None, :] > column[:, None])
            last = tl.max(later.to(tl.int32), axis=1) == 0
            tl.store(out + place, tl.load(values + first + column, mask=some), mask=last & some)
            tl.debug_barrier()


def put(values: Tensor, places: Tensor, out: Tensor) -> None:
    if k := places.numel():
        disorder = torch.zeros((), dtype=torch.int32, device=out.device)
        grid = (triton.cdiv(k, WIDTH),)
        _disorder_kernel[grid](places, k, disorder, WIDTH, **APART)
        _put_kernel[grid](values, places, k, disorder, out, WIDTH, IN_ORDER, **APART)


# Payloads -----------------------------------------------------------------------------------------------------------


@triton.jit
def _place(indices, j, inside, chunk, keep, n):
    """Return the place in the vector of index j; places outside the chunk move to its last element."""
    start = j // keep * chunk
    index = tl.load(indices + j, mask=inside, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    return start + tl.minimum(index, tl.minimum(chunk, n - start) - 1)


@triton.jit
def _write(values, j, place, inside, out, ADDING: tl.constexpr):
    """Write or add value j if it is finite."""
    v = tl.load(values + j, mask=inside, other=0).to(out.dtype.element_ty)
    inside &= v - v == 0
    if ADDING:
        v = tl.load(out + place, mask=inside) + v
    tl.store(out + place, v, mask=inside)


@triton.jit
def _chunk_disorder_kernel(indices, k, chunk, keep, n, disorder, WIDTH: tl.constexpr):
    """Set a chunk's `disorder` to 1 where a place is not above the one before it."""
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (j < k) & (j % keep > 0)
    here = _place(indices, j, inside, chunk, keep, n)
    before = _place(indices, j - 1, inside, chunk, keep, n)
    tl.store(disorder + j // keep, tl.full((WIDTH,), 1, tl.int32), mask=inside & (here <= before))


@triton.jit
def _spread_kernel(values, indices, k, chunk, keep, n, disorder, out, ADDING: tl.constexpr, WIDTH: tl.constexpr):
    """Write the values of chunks without disorder."""
    j = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = j < k
    if disorder is not None:
        inside = inside & (tl.load(disorder + j // keep, mask=inside, other=1) == 0)
    _write(values, j, _place(indices, j, inside, chunk, keep, n), inside, out, ADDING)


@triton.jit
def _spread_in_order_kernel(
    values, indices, k, chunk, keep, n, chunks, disorder, out, ADDING: tl.constexpr, WIDTH: tl.constexpr
):
    """Write the values of chunks with disorder, a lane for each chunk."""
    chunk_number = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    damaged = tl.load(disorder + chunk_number, mask=chunk_number < chunks, other=0) > 0
    if tl.max(damaged.to(tl.int32)) > 0:
        for e in range(0, keep):
            j = chunk_number * keep + e
            inside = damaged & (j < k)
            _write(values, j, _place(indices, j, inside, chunk, keep, n), inside, out, ADDING)
            tl.debug_barrier()


def spread_chunks(values: Tensor, indices: Tensor, chunk: int, keep: int, out: Tensor, adding: bool) -> None:
    if not adding:
        out.zero_()
    n, k = out.numel(), values.numel()
    if k == 0:
        return
    given, grid = (values, indices, k, int(chunk), int(keep), n), (triton.cdiv(k, WIDTH),)
    if keep == 1:
        _spread_kernel[grid](*given, None, out, bool(adding), WIDTH, **APART)
        return
    chunks = -(-n // chunk)
    disorder = torch.zeros(chunks, dtype=torch.int32, device=out.device)
    _chunk_disorder_kernel[grid](*given[1:], disorder, WIDTH, **APART)
    _spread_kernel[grid](*given, disorder, out, bool(adding), WIDTH, **APART)
    _spread_in_order_kernel[(triton.cdiv(chunks, 128),)](*given, chunks, disorder, out, bool(adding), 128, **APART)


@triton.jit
def _count_kernel(words, n, counts, TILE: tl.constexpr):
    """Count the bits of each TILE elements that are 1."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(bit_at(words, at, at < n).to(tl.int32)))


@triton.jit
def _ranks(words, n, counts, TILE: tl.constexpr):
    """Return the program's elements, their bits, and the number of bits before each that are 1.

    counts : int64, bits that are 1 up to the end of each program's elements.
    """
    program = tl.program_id(0)
    at = program.to(tl.int64) * TILE + tl.arange(0, TILE)
    marked = bit_at(words, at, at < n)
    mark = marked.to(tl.int32)
    before = tl.load(counts + program - 1, mask=program > 0, other=0)
    return at, marked, before + tl.cumsum(mark, axis=0) - mark


def _running_counts(words: Tensor, n: int) -> Tensor:
    """Return the number of bits that are 1 up to the end of each TILE elements; int64."""
    counts = torch.empty(triton.cdiv(n, TILE), dtype=torch.int32, device=words.device)
    _count_kernel[(counts.numel(),)](words, n, counts, TILE, **APART)
    return torch.cumsum(counts, 0)


@triton.jit(do_not_specialize=["divisor", "most"])
def _compress_masked_kernel(x, words, n, counts, divisor, most, kept, room, TILE: tl.constexpr):
    at, marked, rank = _ranks(words, n, counts, TILE)
    taken = marked & (rank < room)
    v = tl.load(x + at, mask=taken, other=0).to(tl.float64) / number(divisor, tl.float64)
    limit = number(most, tl.float64)
    v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v))
    tl.store(kept + rank, v.to(tl.float32), mask=taken)


def compress_masked(x: Tensor, words: Tensor, divisor: float, most: float, kept: Tensor) -> Tensor:
    n, room = x.numel(), kept.numel()
    if n == 0:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    counts = _running_counts(words, n)
    scales = bits_of(divisor, torch.float64), bits_of(most, torch.float64)
    _compress_masked_kernel[(counts.numel(),)](x, words, n, counts, *scales, kept, room, TILE, **APART)
    return counts[-1].clamp(max=room)


@triton.jit
def _spread_masked_kernel(words, n, counts, kept, room, out, TILE: tl.constexpr):
    _, marked, rank = _ranks(words, n, counts, TILE)
    v = tl.load(kept + rank, mask=marked & (rank < room), other=0)
    v = tl.where(v - v == 0, v, 0)
    write(out, tl.program_id(0).to(tl.int64) * TILE, n, v.to(out.dtype.element_ty), TILE)


def spread_masked(words: Tensor, kept: Tensor, out: Tensor) -> None:
    if n := out.numel():
        counts = _running_counts(words, n)
        _spread_masked_kernel[(counts.numel(),)](words, n, counts, kept, kept.numel(), out, TILE, **APART)
