"""The largest magnitudes of each chunk of a vector, or of a vector and a residual that is added on the fly.

Magnitudes are compared as integers, a float's bits without its sign. NaN and infinity are then above all numbers, so
the largest magnitude shows whether there are any. Sums that are NaN may have other bits than on the CPU, where the
processor makes NaN of another kind: that changes which of several NaN is the largest, and nothing else.

Short chunks are held in registers, several by one program, and read once: the threshold is found there by halving.
Long ones are searched by `mpicomp.kernels.gpu.radix_select`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.arrays import compensate
from mpicomp.kernels.gpu.common import APART, finite_flag, is_set, mean_of
from mpicomp.kernels.gpu.radix_select import keep_rows, largest_of_long, load, load_rows, sizes

LONGEST = 32768  # bytes of a chunk that one program holds
TILE = 8192  # bytes of several chunks that one program holds: more take more than 100 registers
WARPS = 8
OF_WARP = 4096  # bytes of chunks that a warp holds where several elements are kept: more warps wait for barriers
PIECES = 1024  # of a long chunk that one program compares at a time
FLOAT32_MAX = float(torch.finfo(torch.float32).max)


@triton.jit
def _largest_kernel(
    x, residual, left, n, chunk, length, pieces, mask, indices, values, tops, most, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The first of the largest magnitudes of each piece: `pieces` of a chunk, `length` elements each.

    tops : magnitudes of the pieces; `indices` are then places within them. None: a piece is a chunk.
    """
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    before = piece % pieces * length
    start = piece // pieces * chunk + before
    stop = tl.minimum(tl.minimum(start + length, start - before + chunk), n)
    column = tl.arange(0, WIDTH)[None, :]
    v = load_rows(x, residual, left, start, column, length, n, ALIGNED)
    inside = column < (stop - start).to(tl.int32)[:, None]
    size = sizes(v, inside, mask)
    top = tl.max(size, axis=1)
    at = tl.min(tl.where(size == top[:, None], column, WIDTH), axis=1)
    some = start < stop
    tl.store(indices + piece, at, mask=some)
    if tops is None:
        tl.store(values + piece, load(x, residual, start + at, some), mask=some)
    else:
        tl.store(tops + piece, top, mask=some)
    tl.atomic_max(most, tl.max(top).to(tl.int64), sem="relaxed")


@triton.jit
def _largest_piece_kernel(x, residual, n, chunk, length, pieces, tops, places, indices, values, WIDTH: tl.constexpr):
    """The first of the largest magnitudes of each chunk, from those of its pieces and their places within them."""
    chunk_number = tl.program_id(0).to(tl.int64)
    start = chunk_number * chunk
    filled = tl.cdiv(tl.minimum(chunk, n - start), length)
    best = tl.full((), -1, tops.dtype.element_ty)
    number = tl.full((), 0, tl.int64)
    for first in range(0, pieces, WIDTH):
        piece = first + tl.arange(0, WIDTH).to(tl.int64)
        top = tl.load(tops + chunk_number * pieces + piece, mask=piece < filled, other=-1)
        here = tl.max(top)
        number = tl.where(here > best, tl.min(tl.where(top == here, piece, pieces)), number)
        best = tl.maximum(best, here)
    at = number * length + tl.load(places + chunk_number * pieces + number)
    tl.store(indices + chunk_number, at)
    tl.store(values + chunk_number, load(x, residual, start + at, at >= 0))


def _tile(x: Tensor, chunk: int) -> tuple[int, int, int]:
    """Return chunks of a program, the power of two that a chunk is padded to, and warps."""
    width = triton.next_power_of_2(chunk)
    rows = max(1, TILE // (width * x.element_size()))
    return rows, width, WARPS if rows * width * x.element_size() <= TILE else 2 * WARPS


def largest(
    x: Tensor, residual: Tensor | None, left: Tensor | None, chunk: int, mask: Any, indices: Tensor, values: Tensor
) -> Tensor:
    n, most = x.numel(), torch.zeros((), dtype=torch.int64, device=x.device)
    if n == 0:
        return most
    chunk, chunks = min(chunk, n), -(-n // chunk)
    longest = LONGEST // x.element_size()
    if chunk <= longest:
        rows, width, warps = _tile(x, chunk)
        _largest_kernel[(triton.cdiv(chunks, rows),)](
            x, residual, left, n, chunk, chunk, 1, int(mask), indices, values, None, most, rows, width, chunk % 4 == 0,
            num_warps=warps, **APART,
        )  # fmt: skip
        return most
    pieces = -(-chunk // longest)
    integers = torch.int32 if x.element_size() == 4 else torch.int64
    tops = torch.empty(chunks * pieces, dtype=integers, device=x.device)
    places = torch.empty(chunks * pieces, dtype=torch.int32, device=x.device)
    _largest_kernel[(chunks * pieces,)](
        x, residual, left, n, chunk, longest, pieces, int(mask), places, None, tops, most, 1, longest, chunk % 4 == 0,
        num_warps=_tile(x, longest)[2], **APART,
    )  # fmt: skip
    width = min(PIECES, triton.next_power_of_2(pieces))
    _largest_piece_kernel[(chunks,)](
        x, residual, n, chunk, longest, pieces, tops, places, indices, values, width, **APART
    )
    return most


@triton.jit
def _threshold(size, k, low, high):
    """Return a number for each row that exactly k of its sizes reach, or with ties the k-th largest; and which it is.

    low, high : sizes that at least k reach, and that the k-th largest does not exceed. Each turn halves their distance.
    """
    exact = k <= 0
    while tl.max(((low < high) & (exact == 0)).to(tl.int32)) > 0:
        # rounded up; high - low + 1 would overflow where a NaN of all bits is among zeros
        middle = high - ((high - low) >> 1)
        reached = tl.sum((size >= middle[:, None]).to(tl.int32), axis=1)
        exact = exact | (reached == k)
        low = tl.where(reached >= k, middle, low)
        high = tl.where(reached >= k, high, middle - 1)
    return low, exact


@triton.jit
def _several_kernel(
    x, residual, left, n, chunk, keep, mask, indices, values, most,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The largest of short chunks, ROWS of them. GROUPS: `keep` or more."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * chunk
    length = tl.maximum(tl.minimum(chunk, n - start), 0)
    k = (keep * length + (chunk - 1)) // chunk
    column = tl.arange(0, WIDTH)[None, :]
    v = load_rows(x, residual, left, start, column, chunk, n, ALIGNED)
    size = sizes(v, column < length.to(tl.int32)[:, None], mask)
    maxima = tl.max(tl.reshape(size, [ROWS, WIDTH // GROUPS, GROUPS]), axis=1)
    top = tl.max(maxima, axis=1)
    tl.atomic_max(most, tl.max(top).to(tl.int64), sem="relaxed")
    # as many elements as there are groups reach the smallest of their maxima; sizes outside are -1
    low = tl.maximum(tl.min(maxima, axis=1), 0)
    threshold, exact = _threshold(size, k, low, tl.maximum(top, low))
    chosen = size >= threshold[:, None]
    if tl.min(exact.to(tl.int32)) == 0:
        above = size > threshold[:, None]
        ties = k - tl.sum(above.to(tl.int32), axis=1)
        chosen = above | (chosen & (tl.cumsum((chosen & ~above).to(tl.int32), axis=1) <= ties[:, None]))
    to = (row * keep)[:, None] + tl.cumsum(chosen.to(tl.int32), axis=1) - 1
    tl.store(indices + to, tl.broadcast_to(column, (ROWS, WIDTH)), mask=chosen)
    tl.store(values + to, v, mask=chosen)


def several(
    x: Tensor, residual: Tensor | None, left: Tensor | None, chunk: int, keep: int, depth: int, mask: Any, high: Any,
    maxima: Any, places: Any, sizes: Any, indices: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    n, most = x.numel(), torch.zeros((), dtype=torch.int64, device=x.device)
    if n == 0:
        return most
    if min(chunk, n) > LONGEST // x.element_size():
        if left is not None:
            if residual is None:
                left.copy_(x)
            else:
                compensate(x, residual, None, left)
            x, residual = left, None
        largest_of_long(x, residual, chunk, keep, int(mask), indices, values, most)
        return most
    width = triton.next_power_of_2(min(chunk, n))
    warps = max(1, width * x.element_size() // OF_WARP)
    rows, groups = max(1, OF_WARP // (width * x.element_size())), min(width, triton.next_power_of_2(keep))
    _several_kernel[(triton.cdiv(-(-n // chunk), rows),)](
        x, residual, left, n, chunk, keep, int(mask), indices, values, most, groups, rows, width, chunk % 4 == 0,
        num_warps=warps, **APART,
    )  # fmt: skip
    return most


# Payloads in one launch: short chunks of which few elements are kept --------------------------------------------------


@triton.jit
def _encode_kernel(
    x, residual, left, n, chunk, mask, infinity, most, values, bits, words, planes, k, finite, LIMITED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The first of the largest magnitudes of each chunk, 64 of them, ROWS at a time: a word of each plane of places.

    left : overwritten with x + residual without the values sent, or None. LIMITED : whether values are rounded to
    float32, which `most` bounds. A float32 behind an odd number of values becomes 0.
    """
    word = tl.program_id(0).to(tl.int64)
    column, plane = tl.arange(0, WIDTH)[None, :], tl.arange(0, 8)
    packed = tl.zeros([8], tl.int64)
    for turn in range(0, 64, ROWS):
        of_word = turn + tl.arange(0, ROWS).to(tl.int64)
        row = word * 64 + of_word
        start = row * chunk
        length = tl.maximum(tl.minimum(chunk, n - start), 0)
        v = load_rows(x, residual, None, start, column, chunk, n, ALIGNED)
        size = sizes(v, column < length.to(tl.int32)[:, None], mask)
        top = tl.max(size, axis=1)
        tl.store(finite, 0, mask=tl.max(top) >= infinity)
        at = tl.min(tl.where(size == top[:, None], column, WIDTH), axis=1)
        some = start < n
        sent = load(x, residual, start + at, some)
        if LIMITED:
            sent = tl.where(sent > most, most, tl.where(sent < -most, -most, sent)).to(tl.float32)
        tl.store(values + row, sent, mask=some)
        if left is not None:
            taken = (column == at[:, None]) & (sent - sent == 0)[:, None]
            rest = v + (sent * -1).to(v.dtype)[:, None]
            keep_rows(left, tl.where(taken, rest, v), start, column, chunk, n, ALIGNED)
        marked = ((at[None, :] >> plane[:, None]) & 1) & some[None, :].to(tl.int32)
        packed += tl.sum(marked.to(tl.int64) << of_word[None, :], axis=1)
    tl.store(planes + plane * words + word, packed, mask=plane < bits)
    if values.dtype.element_ty == tl.float32:
        tl.store(values + k, 0.0, mask=(k % 2 == 1) & (word == words - 1))


def encode(x: Tensor, residual: Tensor | None, left: Tensor | None, chunk: int, values: Tensor, planes: Tensor) -> Any:
    """Overwrite the values and the planes of a payload that keeps one element of each chunk, of at most 128.

    x, residual, left, chunk : as in `largest`; but `left` lacks the values sent. values : float32[chunks] or, for
    float64, float64[chunks]; what fills the payload up to the planes is cleared. planes : int64[bits, words]. Returns
    whether all of x + residual is finite.
    """
    finite = finite_flag(x)
    if n := x.numel():
        mask, infinity = (0x7FFFFFFF, 0x7F800000) if x.element_size() == 4 else (2**63 - 1, 0x7FF0000000000000)
        width, (bits, words) = triton.next_power_of_2(chunk), planes.shape
        rows = min(64, max(1, TILE // (width * x.element_size())))
        _encode_kernel[(words,)](
            x, residual, left, n, chunk, mask, infinity, FLOAT32_MAX, values, bits, words, planes, values.numel(),
            finite, x.element_size() > values.element_size(), rows, width, chunk % 4 == 0, num_warps=WARPS, **APART,
        )  # fmt: skip
    return is_set(finite)


@triton.jit(do_not_specialize=["ranks"])
def _mean_kernel(
    values, planes, values_of_rank, words_of_rank, ranks, bits, words, k, chunk, keep, n, mean, finite,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The mean of the ranks' elements, which they keep `keep` of in each chunk; ROWS chunks."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = row * chunk
    length = tl.maximum(tl.minimum(chunk, n - start), 1)
    column = tl.arange(0, WIDTH)[None, :]
    total = tl.zeros([ROWS, WIDTH], mean.dtype.element_ty)
    for rank in range(0, ranks):
        for e in range(0, keep):
            j = row * keep + e
            inside = (j < k) & (start < n)
            place = tl.zeros([ROWS], tl.int64)
            plane = planes + (j >> 6)
            for b in range(bits):
                place |= ((tl.load(plane, mask=inside, other=0) >> (j & 63)) & 1) << b
                plane += words
            v = tl.load(values + j, mask=inside, other=0)
            here = (column == tl.minimum(place, length - 1)[:, None]) & (inside & (v - v == 0))[:, None]
            # the first rank's value is written, and not added to 0, which would change the sign of a zero
            total = tl.where(here, tl.where(rank > 0, total + v[:, None], v[:, None]), total)
        values += values_of_rank
        planes += words_of_rank
    value = mean_of(total, ranks)
    keep_rows(mean, value, start, column, chunk, n, ALIGNED)
    tl.store(finite, 0, mask=tl.max(tl.max((value - value != 0).to(tl.int32), axis=1)) > 0)


def mean(values: Tensor, planes: Tensor, chunk: int, keep: int, out: Tensor) -> Tensor:
    """Write the mean of what `sparse.spread_chunks` writes for each rank, added up in their order.

    values : like out, [ranks, k]. planes : int64[ranks, bits, words], of places within chunks. Only their rows need be
    contiguous. Returns whether the mean is finite.
    """
    finite, (ranks, bits, words) = finite_flag(out), planes.shape
    if n := out.numel():
        rows, width, warps = _tile(out, chunk)
        _mean_kernel[(triton.cdiv(-(-n // chunk), rows),)](
            values, planes, values.stride(0), planes.stride(0), ranks, bits, words, values.shape[1], chunk, keep, n,
            out, finite, rows, width, chunk % 4 == 0, num_warps=warps, **APART,
        )  # fmt: skip
    return is_set(finite)
