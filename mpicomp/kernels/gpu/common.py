"""What the kernels share: scalars as bit patterns, masks as words, sums of lanes in the CPU's order."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels import streams

LANES = tl.constexpr(16)  # sums that the CPU keeps side by side: element i goes to lane i mod 16
BLOCK = tl.constexpr(streams.BLOCK)
# of a launch: products are rounded before something is added to them, as on the CPU; Triton warns where that is open
APART: dict[str, Any] = {"enable_fp_fusion": False}
_FLOATS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


_given = threading.local()


@contextmanager
def clearing(flag: Tensor) -> Iterator[None]:
    """Have kernels that this thread launches clear a flag, uint8[1], instead of new ones, which take a launch each."""
    before, _given.flag = getattr(_given, "flag", None), flag
    try:
        yield
    finally:
        _given.flag = before


def finite_flag(like: Tensor) -> Tensor:
    """Return the flag that a kernel overwrites with 0 where a value is not finite: uint8[1], given or new."""
    given: Tensor | None = getattr(_given, "flag", None)
    return torch.ones(1, dtype=torch.uint8, device=like.device) if given is None else given


def is_set(flag: Tensor) -> Tensor:
    """View a flag as bool[]."""
    return flag.view(torch.bool).view(())


def signed(value: np.generic) -> int:
    """The bits of a NumPy scalar as a signed integer, which Triton takes without changing them."""
    return int.from_bytes(value.tobytes(), sys.byteorder, signed=True)


def bits_of(value: Any, dtype: torch.dtype) -> int:
    """The bits of a number of type float32 or float64; `number` makes it a number again.

    Triton takes Python's floats for float32.
    """
    return signed(_FLOATS[dtype](value))


@triton.jit
def number(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The float32 or float64 with these bits."""
    if dtype == tl.float64:
        return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return tl.cast(bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def to_words(mask):  # type: ignore[no-untyped-def]
    """bool[words, 64] to int64[words]: element i of a row is bit i."""
    return tl.sum(mask.to(tl.int64) << tl.arange(0, 64)[None, :].to(tl.int64), axis=1)


@triton.jit
def to_bits(words):  # type: ignore[no-untyped-def]
    """int64[words] to bool[words * 64], the opposite of `to_words`."""
    bits = (words[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1
    return tl.reshape(bits, [words.shape[0] * 64]) != 0


@triton.jit
def bit_at(words, at, inside):  # type: ignore[no-untyped-def]
    """Bit `at`, an int64 tensor, of packed words, as bool; false where not `inside`."""
    return ((tl.load(words + (at >> 6), mask=inside, other=0) >> (at & 63)) & 1) != 0


@triton.jit
def elements(pointer, at, stop, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements `at`; 0 from `stop` on. WHOLE: none of them is there."""
    if WHOLE:
        return tl.load(pointer + at)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return tl.load(pointer + at, mask=at < stop, other=0)


@triton.jit
def keep_elements(pointer, at, stop, values, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Overwrite elements `at` before `stop`."""
    if WHOLE:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=at < stop)


# A mask that ends anywhere costs all of a program's accesses of 16 bytes. So only the last program has one.


@triton.jit
def read(pointer, start, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """WIDTH elements from `start` on; 0 from element n on."""
    at = start + tl.arange(0, WIDTH)
    if start + WIDTH <= n:  # noqa: SIM108 - both sides of an expression would be computed
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=at < n, other=0)
    return found


@triton.jit
def write(pointer, start, n, values, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Overwrite WIDTH elements from `start` on, before element n."""
    at = start + tl.arange(0, WIDTH)
    if start + WIDTH <= n:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=at < n)


@triton.jit
def read_bits(words, start, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of WIDTH elements from `start` on, a multiple of 64, as bool; false from element n on, up to its word."""
    word = start // 64 + tl.arange(0, WIDTH // 64)
    return to_bits(tl.load(words + word, mask=word * 64 < n, other=0))


@triton.jit
def fold(lanes):  # type: ignore[no-untyped-def]
    """Sum of 16 lanes, [blocks, 16] to [blocks], halves first: l0 + l8, ..., then l0 + l4, ... as on the CPU."""
    blocks: tl.constexpr = lanes.shape[0]
    eight = tl.sum(tl.reshape(lanes, [blocks, 2, 8]), axis=1)
    four = tl.sum(tl.reshape(eight, [blocks, 2, 4]), axis=1)
    two = tl.sum(tl.reshape(four, [blocks, 2, 2]), axis=1)
    return tl.sum(two, axis=1)
