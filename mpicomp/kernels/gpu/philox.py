"""The random words of `mpicomp.kernels.cpu.philox`: Philox4x32-7 and Walker's alias method.

Kernels draw with the functions below. Their `key` is that of `key_of`; `step` and `source` are counter words.
A Philox block is numbered 4 g + l, with l from 0 to 3: word l of group g and its word 4 + l.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.gpu.common import APART, places_on, read, signed, write

ROUNDS = tl.constexpr(streams.ROUNDS)
BLOCKS = 256  # Philox blocks of a program, two words each
WIDTH = 1024  # words of a program that merges


def key_of(schedule: NDArray[np.uint64]) -> int:
    """Return both key words of a `Stream.schedule` as one signed number."""
    return signed(schedule[0] | schedule[4] << np.uint64(32))


@triton.jit
def draw(key, block, number, step, source):
    """Outputs x0 .. x3, uint32, of Philox blocks. block : int64, of any shape. number : of the draw; like block."""
    first = block.to(tl.uint32)
    second = (number | ((block >> 32) << 8)).to(tl.uint32)
    third, fourth = tl.cast(step, tl.int64).to(tl.uint32), tl.cast(source, tl.int64).to(tl.uint32)
    return tl.philox(tl.cast(key, tl.int64), first, second, third, fourth, ROUNDS)


@triton.jit
def draw_pair(key, block, number, step, source):
    """Words l and 4 + l, uint64, of draw `number` of the blocks' groups."""
    x0, x1, x2, x3 = draw(key, block, number, step, source)
    low = x0.to(tl.uint64) | (x1.to(tl.uint64) << 32)
    return low, x2.to(tl.uint64) | (x3.to(tl.uint64) << 32)


@triton.jit
def uniforms(key, first, step, source, SIZE: tl.constexpr):
    """uint32[SIZE]: 32 bits for each element from `first` on; both are multiples of 16.

    The upper half of `source` is added to each, modulo 2^32.
    Sixteen elements e, e + 1, ... have the words of draw e mod 512 / 16 of group e div 512, two elements a word.
    """
    turn = tl.cast(first, tl.int64) // 16 + tl.arange(0, SIZE // 16)[:, None]
    both = tl.cast(source, tl.int64)
    x0, x1, x2, x3 = draw(key, ((turn >> 5) << 2) + tl.arange(0, 4)[None, :], turn & 31, step, both & 0xFFFFFFFF)
    pairs = tl.join(tl.join(x0, x1), tl.join(x2, x3))  # [turn, l, half of a word, words l or 4 + l]
    return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), [SIZE]) + ((both >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _choose(key, word, cells, even, odd, step, source, aliases, low_thresholds, high_thresholds, rest):
    """Outcomes of the 16 cells of each word; word : their numbers in the whole vector."""
    outcomes, ties = tl.zeros_like(cells), tl.zeros_like(cells).to(tl.int32)
    for nibble in tl.static_range(16):
        cell = (cells >> (4 * nibble)) & 15
        drawn = ((odd if nibble % 2 else even) >> (nibble // 2 * 8)) & 255
        threshold = (tl.where(cell < 8, low_thresholds, high_thresholds) >> ((cell & 7) * 8)) & 255
        outcome = tl.where(drawn > threshold, (aliases >> (cell * 4)) & 15, cell)
        outcomes |= outcome << (4 * nibble)
        ties |= (drawn == threshold).to(tl.int32) << nibble
    while tl.max(ties) > 0:  # of each word the first, by 32 more bits
        tie = ties & -ties
        half_byte = ((tie & 0xAAAA) != 0).to(tl.int64) + ((tie & 0xCCCC) != 0).to(tl.int64) * 2
        half_byte += ((tie & 0xF0F0) != 0).to(tl.int64) * 4 + ((tie & 0xFF00) != 0).to(tl.int64) * 8
        place = (half_byte * 4).to(tl.uint64)
        tied = (cells >> place) & 15
        x0, _, _, _ = draw(key, word * 16 + half_byte, 3, step, source)
        beyond = (tie != 0) & (x0.to(tl.int64) >= tl.load(rest + tied.to(tl.int64)))
        outcomes ^= tl.where(beyond, tied ^ ((aliases >> (tied * 4)) & 15), 0) << place
        ties ^= tie
    return outcomes


@triton.jit
def bernoulli_pair(key, block, step, source, aliases, low_thresholds, high_thresholds, rest):
    """Words l and 4 + l, uint64, of the blocks' groups; each bit is 1 with the probability behind the table.

    block : int64[blocks]. aliases, low_thresholds, high_thresholds, rest : as `table_arguments` gives them.
    """
    low, high = draw_pair(key, block, 0, step, source)
    if rest is not None:
        low_even, high_even = draw_pair(key, block, 1, step, source)
        low_odd, high_odd = draw_pair(key, block, 2, step, source)
        alias = tl.cast(aliases, tl.int64).to(tl.uint64, bitcast=True)
        below = tl.cast(low_thresholds, tl.int64).to(tl.uint64, bitcast=True)
        above = tl.cast(high_thresholds, tl.int64).to(tl.uint64, bitcast=True)
        word = ((block >> 2) << 3) + (block & 3)
        low = _choose(key, word, low, low_even, low_odd, step, source, alias, below, above, rest)
        high = _choose(key, word + 4, high, high_even, high_odd, step, source, alias, below, above, rest)
    return low, high


def table_arguments(
    table: NDArray[np.uint8], rest: NDArray[np.uint64], device: torch.device
) -> tuple[int, int, int, Tensor | None]:
    """Return a table of `streams.bernoulli_table` as arguments of `bernoulli_pair`.

    Returns
    -------
    int, int, int, int64[16]
        The aliases of the 16 cells, four bits each; the threshold bytes of the first eight, of the others; their next
        bits, on the device, or None where every cell is its own outcome.
    """
    if rest.size == 0:
        return 0, 0, 0, None
    aliases = (table[0:16:2] | table[1:16:2] << np.uint8(4)).view(np.int64)
    low, high = table[32:48].view(np.int64)
    return int(aliases[0]), int(low), int(high), places_on(device, rest.view(np.int64))


@triton.jit(do_not_specialize=["key", "first", "step", "source", "aliases", "low", "high"])
def _draw_words_kernel(key, first, step, source, aliases, low, high, rest, n, out, BLOCKS: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lower, upper = bernoulli_pair(key, first + block, step, source, aliases, low, high, rest)
    at = ((block >> 2) << 3) + (block & 3)
    tl.store(out + at, lower.to(tl.int64, bitcast=True), mask=at < n)
    tl.store(out + at + 4, upper.to(tl.int64, bitcast=True), mask=at < n)


def draw_words(
    schedule: NDArray[np.uint64], first_group: Any, step: Any, source: Any, table: NDArray[np.uint8],
    rest: NDArray[np.uint64], scratch: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    if n := out.numel():
        arguments = table_arguments(table, rest, out.device)
        _draw_words_kernel[(triton.cdiv(n, 2 * BLOCKS),)](
            key_of(schedule), 4 * int(first_group), int(step), int(source), *arguments, n, out, BLOCKS, **APART
        )


@triton.jit
def _merge_words_kernel(words, incoming, held, n, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    old = read(held, start, n, WIDTH)
    taken = (old ^ read(incoming, start, n, WIDTH)) & read(words, start, n, WIDTH)
    write(held, start, n, old ^ taken, WIDTH)


def merge_words(words: Tensor, incoming: Tensor, held: Tensor) -> None:
    if n := held.numel():
        _merge_words_kernel[(triton.cdiv(n, WIDTH),)](words, incoming, held, n, WIDTH, **APART)
