"""Small integers to bit planes and back, and bytes of float32 numbers, in the layout of `mpicomp.kernels.cpu.planes`.

Codes of 16 and 32 bits are int16 and int32 tensors of those bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, read, to_words, write

WORDS = 16  # words of each plane that a program packs
WIDTH = 1024  # codes or numbers of any other program
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _pack_planes_kernel(codes, n, bits, words, planes, WORDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    word = start // 64 + tl.arange(0, WORDS)
    code = tl.reshape(read(codes, start, n, WORDS * 64).to(tl.int32), [WORDS, 64])
    to = planes + word
    for j in range(bits):
        tl.store(to, to_words(((code >> j) & 1) != 0), mask=word < words)
        to += words


def pack_planes(codes: Tensor, powers: NDArray[Any] | None, planes: Tensor) -> None:
    if n := codes.numel():
        bits, words = planes.shape
        _pack_planes_kernel[(triton.cdiv(words, WORDS),)](codes, n, bits, words, planes, WORDS, **APART)


@triton.jit
def codes_of(planes, words, start, n, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of WIDTH elements from `start` on, int32[32, WIDTH / 32], a column for each word.

    Codes of words behind element n are 0. planes : int32, `words` of each plane. A thread loads a word once, and has
    all codes of its column.
    """
    # A field of 4 to 32 bits has a code: each operation on a word works on all of its fields at once.
    FIELD: tl.constexpr = 4 if BITS <= 4 else 8 if BITS <= 8 else 16 if BITS <= 16 else 32
    ONES: tl.constexpr = 0xFFFFFFFF // ((1 << FIELD) - 1)
    MOST: tl.constexpr = -1 if BITS == 32 else (1 << BITS) - 1
    word = start // 32 + tl.arange(0, WIDTH // 32)
    fields = tl.zeros([FIELD, WIDTH // 32], tl.int32)
    plane = planes + word
    for j in tl.static_range(BITS):
        found = tl.load(plane, mask=word * 32 < n, other=0)
        fields |= ((found[None, :] >> tl.arange(0, FIELD)[:, None]) & ONES) << j
        plane += words
    shift = FIELD * tl.arange(0, 32 // FIELD)
    return tl.reshape((fields[None, :, :] >> shift[:, None, None]) & MOST, [32, WIDTH // 32])


@triton.jit
def in_order(columns):
    """Elements of words, [32, words], one after the other."""
    return tl.reshape(tl.trans(columns), [columns.shape[1] * 32])


@triton.jit
def _unpack_planes_kernel(planes, words, n, codes, BITS: tl.constexpr, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    code = codes_of(planes, words, start, n, BITS, WIDTH)
    write(codes, start, n, in_order(code.to(codes.dtype.element_ty)), WIDTH)


def unpack_planes(planes: Tensor, powers: NDArray[Any] | None, codes: Tensor) -> None:
    if n := codes.numel():
        bits, words = planes.shape
        _unpack_planes_kernel[(triton.cdiv(n, WIDTH),)](
            planes.view(torch.int32), 2 * words, n, codes, bits, WIDTH, num_warps=1, **APART
        )


# Bytes of float32 numbers ---------------------------------------------------------------------------------------------


@triton.jit
def _split_bytes_kernel(words, n, count, columns, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    word = read(words, start, n, WIDTH)
    to = columns
    for j in range(count):
        write(to, start, n, ((word >> (24 - 8 * j)) & 255).to(tl.uint8), WIDTH)
        to += n


def split_bytes(words: Tensor, columns: Tensor) -> None:
    if n := words.numel():
        _split_bytes_kernel[(triton.cdiv(n, WIDTH),)](words, n, columns.shape[0], columns, WIDTH, **APART)


@triton.jit
def _join_bytes_kernel(columns, n, count, rest, shift, words, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    word = tl.zeros([WIDTH], tl.int32)
    source = columns
    for j in range(count):
        word |= read(source, start, n, WIDTH).to(tl.int32) << (24 - 8 * j)
        source += n
    if rest is not None:
        word |= read(rest, start, n, WIDTH).to(tl.int32) << shift
    write(words, start, n, tl.where((word & EXPONENT) == EXPONENT, 0, word), WIDTH)


def join_bytes(columns: Tensor, rest: Tensor | None, shift: int, words: Tensor) -> None:
    if n := words.numel():
        _join_bytes_kernel[(triton.cdiv(n, WIDTH),)](
            columns, n, columns.shape[0], rest, int(shift), words, WIDTH, **APART
        )
