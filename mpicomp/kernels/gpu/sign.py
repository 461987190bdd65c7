"""Signs to bits and back: one bit per element, element i is bit i mod 64 of word i div 64."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels.gpu.common import APART, finite_flag, is_set, launch, read, read_bits, signed, to_words, write

WORDS = 16  # words of a program that packs
WIDTH = 1024  # elements of any other program


@triton.jit
def is_positive(x, at, ODD_POSITIVE: tl.constexpr):
    """Return whether numbers count as positive: of zeros those at odd places, or at even ones."""
    return (x > 0) | ((x == 0) & ((at & 1) == ODD_POSITIVE))


@triton.jit
def _pack_kernel(x, n, bits, finite, ODD_POSITIVE: tl.constexpr, WORDS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    at = start + tl.arange(0, WORDS * 64)
    v = read(x, start, n, WORDS * 64)
    word = start // 64 + tl.arange(0, WORDS)
    positive = tl.reshape(is_positive(v, at, ODD_POSITIVE) & (at < n), [WORDS, 64])
    tl.store(bits + word, to_words(positive), mask=word * 64 < n)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def pack(x: Tensor, bits: Tensor, odd_positive: bool, zero: Any, tiny: Any) -> Tensor:
    finite = finite_flag(x)
    if n := x.numel():
        _pack_kernel[(triton.cdiv(n, 64 * WORDS),)](x, n, bits, finite, int(odd_positive), WORDS, **APART)
    return is_set(finite)


@triton.jit(do_not_specialize=["positive", "negative"])
def _unpack_kernel(bits, positive, negative, n, out, WIDTH: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    value = tl.where(read_bits(bits, start, n, WIDTH), tl.cast(positive, tl.int64), tl.cast(negative, tl.int64))
    write(out, start, n, value.to(out.dtype.element_ty), WIDTH)


def unpack(bits: Tensor, positive: np.generic, negative: np.generic, streaming: bool, out: Tensor) -> None:
    if n := out.numel():
        _unpack_kernel[(triton.cdiv(n, WIDTH),)](bits, signed(positive), signed(negative), n, out, WIDTH, **APART)


@triton.jit
def _all_finite_kernel(x, n, finite, WIDTH: tl.constexpr):
    v = read(x, tl.program_id(0).to(tl.int64) * WIDTH, n, WIDTH)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def all_finite(x: Tensor) -> Tensor:
    finite = finite_flag(x)
    if n := x.numel():
        launch(_all_finite_kernel, triton.cdiv(n, WIDTH), x, n, finite, WIDTH, **APART)
    return is_set(finite)


@triton.jit
def _all_finite_16_kernel(bits, n, finite, EXPONENT: tl.constexpr, WIDTH: tl.constexpr):
    code = read(bits, tl.program_id(0).to(tl.int64) * WIDTH, n, WIDTH).to(tl.int32)
    tl.store(finite, 0, mask=tl.max(((code & EXPONENT) == EXPONENT).to(tl.int32)) > 0)


def all_finite_16(bits: Tensor, exponent: np.uint16) -> Tensor:
    finite = finite_flag(bits)
    if n := bits.numel():
        _all_finite_16_kernel[(triton.cdiv(n, WIDTH),)](bits, n, finite, int(exponent), WIDTH, **APART)
    return is_set(finite)
