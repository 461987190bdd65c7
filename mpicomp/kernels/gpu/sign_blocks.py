"""Signs of blocks of many tensors: their residuals are added, and signs packed, in one launch.

Sums have the order that `mpicomp.kernels.cpu.sign` gives them: a program adds the words of a few blocks one after the
other, 16 lanes a block; the elements behind the last whole word are added one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import (
    APART,
    LANES,
    fold,
    launch,
    number,
    read,
    read_at,
    to_bits,
    to_words,
    write,
    write_at,
)
from mpicomp.kernels.gpu.sign import is_positive
from mpicomp.kernels.gpu.sums import STAGES, TURN, add_columns, add_rows

WIDE = tl.constexpr(1024)  # elements of a turn that adds nothing up
COLUMNS = tl.constexpr(4)  # of a table of blocks
ROWS = tl.constexpr(6)  # numbers of a tensor among the scales
STEP, LIMIT, LEAST, PREVIOUS, POSITIVE, NEGATIVE = (tl.constexpr(i) for i in range(6))


class BlockRows(NamedTuple):
    """Blocks of up to 4096 elements that a launch works on, one program each.

    Attributes
    ----------
    table : int64[all blocks, 4]
        First element, a multiple of 64; the element behind the last; tensor; place of the first element's word. On the
        device.
    first, n_blocks : int
        The rows that are meant.
    aligned : bool
        All blocks end at multiples of 64. Otherwise the last turn of each takes its elements one by one.
    """

    table: Tensor
    first: int
    n_blocks: int
    aligned: bool


@triton.jit
def _sum_one_by_one(u, start, stop):
    """Sum of the magnitudes of some elements, float64[1]."""
    total = tl.zeros([1], tl.float64)
    for first in range(start, stop, LANES):
        at = first + tl.arange(0, LANES)[None, :]
        total = add_columns(total, tl.abs(read_at(u, at, at < stop, False)).to(tl.float64))
    return total


@triton.jit
def block_of_program(blocks, first, ALIGNED: tl.constexpr):
    """Block of a program: first element, the one behind the last, tensor, and place of the first word."""
    row = blocks + (first + tl.program_id(0).to(tl.int64)) * COLUMNS
    begin, end, word = tl.multiple_of(tl.load(row), 64), tl.load(row + 1), tl.load(row + 3)
    if ALIGNED:
        end = tl.multiple_of(end, 64)
    return begin, end, tl.load(row + 2), word


@triton.jit
def _turns(begin, end):
    """Return the number of whole turns of a block, and of all its turns."""
    return ((end - begin) // TURN).to(tl.int32), tl.cdiv(end - begin, TURN).to(tl.int32)


@triton.jit
def _load_words(bits, word, count, WHOLE: tl.constexpr):
    """Load the words of a turn; those behind `count` elements are 0."""
    place = tl.arange(0, TURN // 64)
    return read_at(bits + word, place, place * 64 < count, WHOLE)


@triton.jit
def _encode_turn(
    u, residual, left, bits, own, most, least, last, first, end, full, word, lanes, noted,
    ODD_POSITIVE: tl.constexpr, LAZY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """noted : NaN where something may overflow (LAZY), else how often elements of these columns were clipped."""
    at = first + tl.arange(0, TURN)
    x = read_at(u, at, at < end, WHOLE)
    magnitude = tl.abs(x) if WHOLE else tl.where(at < full, tl.abs(x), 0)
    if residual is None:
        positive = is_positive(x, at, ODD_POSITIVE)
    else:
        c = read_at(residual, at, at < end, WHOLE)
        if LAZY:
            x = x + tl.where(to_bits(_load_words(bits, word, end - first, WHOLE)), c - last, c + last)
            positive = x >= 0
            # nothing bounds x, nor x less the coming result: NaN where one of them may overflow
            largest = tl.abs(x) + own
            noted += largest - largest if WHOLE else tl.where(at < end, largest - largest, 0)
        else:
            x = x + c
            positive = x >= 0
            x = tl.where(positive, x - own, x + own)
            bounded = tl.where(x > most, most, x)
            bounded = tl.where(bounded < least, least, bounded)
            if WHOLE:
                beyond = (x > most) | (x < least) | (x != x)
            else:
                beyond = ((x > most) | (x < least) | ((at < full) & (x != x))) & (at < end)
            noted += beyond.to(tl.int32)
            x = bounded
        write_at(left, at, at < end, WHOLE, x)
    lanes = add_rows(lanes, tl.reshape(magnitude, [1, TURN]))
    packed = to_words(tl.reshape(positive if WHOLE else positive & (at < end), [TURN // 64, 64]))
    place = tl.arange(0, TURN // 64)
    write_at(bits + word, place, place * 64 < end - first, WHOLE, packed)
    return lanes, noted


@triton.jit
def _report(lanes, rest, count, reports):
    """Write a block's sum, and how many of its elements were clipped."""
    at = tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 1)
    total = fold(tl.reshape(lanes, [1, LANES])) + rest
    tl.store(reports + at, total.to(tl.int64, bitcast=True))
    tl.store(reports + at + 1, count)


@triton.jit(do_not_specialize=["first"])
def _encode_kernel(
    u, residual, left, bits, blocks, first, scales, reports, ALIGNED: tl.constexpr, ODD_POSITIVE: tl.constexpr,
    LAZY: tl.constexpr,
):  # fmt: skip
    begin, end, tensor, word = block_of_program(blocks, first, ALIGNED)
    full = begin + (end - begin) // 64 * 64  # up to here magnitudes are added in lanes
    rest = _sum_one_by_one(u, full, end)
    lanes = tl.zeros([LANES], tl.float64)
    noted = tl.zeros([TURN], u.dtype.element_ty if LAZY else tl.int32)
    # before the turns, in which the stores would keep these loads from being moved out
    scales += tensor * ROWS
    kind = u.dtype.element_ty
    own, most = number(tl.load(scales + STEP), kind), number(tl.load(scales + LIMIT), kind)
    least, last = number(tl.load(scales + LEAST), kind), number(tl.load(scales + PREVIOUS), kind)
    whole_turns, turns = _turns(begin, end)
    for turn in tl.range(0, whole_turns, num_stages=STAGES):
        lanes, noted = _encode_turn(
            u, residual, left, bits, own, most, least, last, begin + turn * TURN, end, full, word + turn * (TURN // 64),
            lanes, noted, ODD_POSITIVE, LAZY, True,
        )  # fmt: skip
    for turn in range(whole_turns, turns):
        lanes, noted = _encode_turn(
            u, residual, left, bits, own, most, least, last, begin + turn * TURN, end, full, word + turn * (TURN // 64),
            lanes, noted, ODD_POSITIVE, LAZY, False,
        )  # fmt: skip
    count = tl.full((), 0, tl.int64)
    if LAZY:
        lanes = lanes + tl.sum(noted).to(tl.float64)
    else:
        count = tl.sum(noted).to(tl.int64)
    _report(lanes, rest, count, reports)


def encode_blocks(
    u: Tensor, residual: Tensor | None, left: Tensor | None, bits: Tensor, blocks: BlockRows, scales: Tensor,
    lazy: bool, odd_positive: bool, reports: Tensor,
) -> None:  # fmt: skip
    """`mpicomp.kernels.cpu.sign.encode` for blocks of many tensors, in one launch.

    u, residual, left, bits, odd_positive : whole vectors; a block's words lie at the place in its row. scales :
    int64[tensors, 6], bits of the columns STEP to NEGATIVE. lazy : rule "paper". reports : int64[blocks, 2],
    overwritten by the bits of each block's sum, and how many of its elements were clipped.
    """
    if blocks.n_blocks:
        launch(
            _encode_kernel, blocks.n_blocks, u, residual, left, bits, blocks.table, blocks.first, scales, reports,
            blocks.aligned, int(odd_positive), lazy and residual is not None, num_warps=1, **APART
        )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _unpack_blocks_kernel(bits, second, blocks, first, scales, out, ALIGNED: tl.constexpr):
    begin, end, tensor, word = block_of_program(blocks, first, ALIGNED)
    scales += tensor * ROWS
    positive, negative = tl.load(scales + POSITIVE), tl.load(scales + NEGATIVE)
    whole_turns, turns = (end - begin) // WIDE, tl.cdiv(end - begin, WIDE)
    for turn in range(0, whole_turns):
        _unpack_turn(bits, second, word, positive, negative, turn, begin, end, out, True)
    for turn in range(whole_turns, turns):
        _unpack_turn(bits, second, word, positive, negative, turn, begin, end, out, False)


@triton.jit
def _unpack_turn(bits, second, word, positive, negative, turn, begin, end, out, WHOLE: tl.constexpr):
    first = begin + turn * WIDE
    place = tl.arange(0, WIDE // 64)
    inside = place * 64 < end - first
    at = word + turn * (WIDE // 64) + place
    one = to_bits(tl.load(bits + at, mask=inside, other=0))
    value = tl.where(one, positive, negative)
    if second is not None:
        value = tl.where(one == to_bits(tl.load(second + at, mask=inside, other=0)), value, 0)
    at = first + tl.arange(0, WIDE)
    write_at(out, at, at < end, WHOLE, value.to(out.dtype.element_ty))


def unpack_blocks(bits: Tensor, second: Tensor | None, blocks: BlockRows, scales: Tensor, out: Tensor) -> None:
    """`unpack`, or with `second` `shared_selection.unpack_pair`, for blocks of many tensors, in one launch.

    bits, second : int64; a block's words lie at the place in its row. blocks, scales : as in `encode_blocks`.
    out : signed integers [n] of the whole vector; the blocks' are overwritten.
    """
    if blocks.n_blocks:
        terms = bits, second, blocks.table, blocks.first, scales, out, blocks.aligned
        launch(_unpack_blocks_kernel, blocks.n_blocks, *terms, **APART)


@triton.jit
def _add_and_clear_turn(
    u, residual, left, bits, last, first, end, full, word, out, lanes, LAZY: tl.constexpr, WHOLE: tl.constexpr
):
    at = first + tl.arange(0, TURN)
    x = read_at(u, at, at < end, WHOLE)
    magnitude = tl.abs(x) if WHOLE else tl.where(at < full, tl.abs(x), 0)
    if residual is not None:
        c = read_at(residual, at, at < end, WHOLE)
        if LAZY:
            c = tl.where(to_bits(_load_words(bits, word, end - first, WHOLE)), c - last, c + last)
        x = x + c
        write_at(left, at, at < end, WHOLE, tl.zeros_like(x))
    if out is not None:
        write_at(out, at, at < end, WHOLE, x)
    return add_rows(lanes, tl.reshape(magnitude, [1, TURN]))


@triton.jit(do_not_specialize=["first"])
def _add_and_clear_kernel(
    u, residual, left, bits, blocks, first, scales, out, reports, ALIGNED: tl.constexpr, LAZY: tl.constexpr
):
    begin, end, tensor, word = block_of_program(blocks, first, ALIGNED)
    full = begin + (end - begin) // 64 * 64
    rest = _sum_one_by_one(u, full, end)  # before the turns, which may write to u
    lanes = tl.zeros([LANES], tl.float64)
    last = number(tl.load(scales + tensor * ROWS + PREVIOUS), u.dtype.element_ty)
    whole_turns, turns = _turns(begin, end)
    for turn in tl.range(0, whole_turns, num_stages=STAGES):
        lanes = _add_and_clear_turn(
            u, residual, left, bits, last, begin + turn * TURN, end, full, word + turn * (TURN // 64), out, lanes, LAZY,
            True,
        )  # fmt: skip
    for turn in range(whole_turns, turns):
        lanes = _add_and_clear_turn(
            u, residual, left, bits, last, begin + turn * TURN, end, full, word + turn * (TURN // 64), out, lanes, LAZY,
            False,
        )  # fmt: skip
    _report(lanes, rest, tl.full((), 0, tl.int64), reports)


def add_and_clear_blocks(
    u: Tensor, residual: Tensor | None, left: Tensor | None, bits: Tensor, blocks: BlockRows, scales: Tensor,
    lazy: bool, out: Tensor | None, reports: Tensor,
) -> None:  # fmt: skip
    """`add_and_clear` for blocks of many tensors, in one launch; parameters as there and in `encode_blocks`."""
    if blocks.n_blocks:
        _add_and_clear_kernel[(blocks.n_blocks,)](
            u, residual, left, bits, blocks.table, blocks.first, scales, out, reports, blocks.aligned,
            lazy and residual is not None, num_warps=1, **APART
        )  # fmt: skip


@triton.jit(do_not_specialize=["first"])
def _subtract_blocks_kernel(x, bits, blocks, first, scales, ALIGNED: tl.constexpr):
    begin, end, tensor, word = block_of_program(blocks, first, ALIGNED)
    own = number(tl.load(scales + tensor * ROWS + PREVIOUS), x.dtype.element_ty)
    for turn in range(0, tl.cdiv(end - begin, WIDE)):
        start = begin + turn * WIDE
        v = read(x, start, end, WIDE)
        place = tl.arange(0, WIDE // 64)
        words = tl.load(bits + word + turn * (WIDE // 64) + place, mask=place * 64 < end - start, other=0)
        write(x, start, end, tl.where(to_bits(words), v - own, v + own), WIDE)


def subtract_blocks(x: Tensor, bits: Tensor, blocks: BlockRows, scales: Tensor) -> None:
    """x -= PREVIOUS of the block's tensor where the bit is 1, x += PREVIOUS elsewhere; as `encode_blocks`."""
    if blocks.n_blocks:
        grid = (blocks.n_blocks,)
        _subtract_blocks_kernel[grid](x, bits, blocks.table, blocks.first, scales, blocks.aligned, **APART)
