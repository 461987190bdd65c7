"""The leading bits of float32 numbers: whole bytes as columns, the rest as bit planes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, read, write

WIDTH = 1024  # numbers of a program
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _split_bytes_kernel(words, n, count, columns, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * WIDTH
    word = read(words, start, n, WIDTH)
    to = columns
    for j in range(count):
        write(to, start, n, ((word >> (24 - 8 * j)) & 255).to(tl.uint8), WIDTH)
        to += n


def split_bytes(words: Tensor, columns: Tensor) -> None:
    """Column j has byte j, the highest first, of each word.

    words : int32[n], the bits of float32. columns : uint8[k, n], overwritten.
    """
    if n := words.numel():
        _split_bytes_kernel[(triton.cdiv(n, WIDTH),)](words, n, columns.shape[0], columns, WIDTH, **APART)


@triton.jit
def _join_bytes_kernel(columns, n, count, rest, shift, words, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
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
    """The opposite of `split_bytes`; bytes that are not there are 0, and so are words of NaN and infinity.

    columns : uint8[k, n], k 1 to 4. rest : uint8[n], ORed in `shift` bits from the lowest one; or None.
    words : int32[n], overwritten.
    """
    if n := words.numel():
        _join_bytes_kernel[(triton.cdiv(n, WIDTH),)](
            columns, n, columns.shape[0], rest, int(shift), words, WIDTH, **APART
        )
