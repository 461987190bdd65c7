"""Small integers to bit planes and back: plane j holds bit j of every code, 64 codes a word.

The layout is that of `mpicomp.kernels.cpu.planes`. Codes of 16 and 32 bits are int16 and int32 tensors of those bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.cpu.planes import powers_of_two
from mpicomp.kernels.gpu.common import APART, read, read_bits, to_words, write

__all__ = ["pack_planes", "powers_of_two", "unpack_planes"]

WORDS = 16  # words of each plane that a program packs
WIDTH = 1024  # codes of a program that unpacks


@triton.jit
def _pack_planes_kernel(codes, n, bits, words, planes, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    word = start // 64 + tl.arange(0, WORDS)
    code = tl.reshape(read(codes, start, n, WORDS * 64).to(tl.int32), [WORDS, 64])
    to = planes + word
    for j in range(bits):
        tl.store(to, to_words(((code >> j) & 1) != 0), mask=word < words)
        to += words


def pack_planes(codes: Tensor, powers: NDArray[Any] | None, planes: Tensor) -> None:
    """Codes of `planes.shape[0]` bits into planes.

    codes : uint8, int16 or int32[n]. powers : not used. planes : int64[bits, ceil(n / 64)], overwritten.
    """
    if n := codes.numel():
        bits, words = planes.shape
        _pack_planes_kernel[(triton.cdiv(words, WORDS),)](codes, n, bits, words, planes, WORDS, **APART)


@triton.jit
def read_planes(planes, bits, words, start, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of WIDTH elements from `start` on, int32; 0 from element n on, up to its word."""
    code = tl.zeros([WIDTH], tl.int32)
    plane = planes
    for j in range(bits):
        code |= read_bits(plane, start, n, WIDTH).to(tl.int32) << j
        plane += words
    return code


@triton.jit
def _unpack_planes_kernel(planes, bits, words, n, codes, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * WIDTH
    code = read_planes(planes, bits, words, start, n, WIDTH)
    write(codes, start, n, code.to(codes.dtype.element_ty), WIDTH)


def unpack_planes(planes: Tensor, powers: NDArray[Any] | None, codes: Tensor) -> None:
    """The opposite of `pack_planes`; codes : overwritten. powers : not used. Bits past the end are not looked at."""
    if n := codes.numel():
        bits, words = planes.shape
        _unpack_planes_kernel[(triton.cdiv(n, WIDTH),)](planes, bits, words, n, codes, WIDTH, **APART)
