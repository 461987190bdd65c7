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
from mpicomp.kernels.gpu.common import APART, bit_at, to_words

__all__ = ["pack_planes", "powers_of_two", "unpack_planes"]

WORDS = 16  # words of each plane that a program packs
WIDTH = 1024  # codes of a program that unpacks


@triton.jit
def _pack_planes_kernel(codes, n, bits, words, planes, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    at = word[:, None] * 64 + tl.arange(0, 64)[None, :]
    code = tl.load(codes + at, mask=at < n, other=0).to(tl.int32)
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
def _unpack_planes_kernel(planes, bits, words, n, codes, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    code = tl.zeros([WIDTH], tl.int32)
    plane = planes
    for j in range(bits):
        code |= bit_at(plane, at, at < n).to(tl.int32) << j
        plane += words
    tl.store(codes + at, code.to(codes.dtype.element_ty), mask=at < n)


def unpack_planes(planes: Tensor, powers: NDArray[Any] | None, codes: Tensor) -> None:
    """The opposite of `pack_planes`; codes : overwritten. powers : not used. Bits past the end are not looked at."""
    if n := codes.numel():
        bits, words = planes.shape
        _unpack_planes_kernel[(triton.cdiv(n, WIDTH),)](planes, bits, words, n, codes, WIDTH, **APART)
