"""Parts of kernels: scalars as bit patterns, masks as words, sums of lanes in the CPU's order, numbers of stretches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels import streams

LANES = tl.constexpr(16)  # sums that the CPU keeps side by side: element i goes to lane i mod 16
BLOCK = tl.constexpr(streams.BLOCK)
# of a launch: products are rounded before something is added to them, as on the CPU; Triton warns where that is open
APART: dict[str, Any] = {"enable_fp_fusion": False}
_FLOATS: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


_given = threading.local()
MOST_FORMS = 4096  # of launches that are known: lengths are numbers, too
_launched: dict[tuple[Any, ...], Callable[..., None]] = {}  # launch compiled kernels, by the forms of their arguments


def launch(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **options: Any) -> None:
    """Launch a kernel whose arguments have the same forms in each step of a vector.

    Triton examines arguments in Python to find the compiled kernel, which takes longer than the launch. Here each has a
    form: the value of a number, or of a tensor its type, whether its memory begins at a multiple of 16 bytes, and
    whether it ends within 2 GiB, as offsets of 32 bits need on AMD's GPUs.
    """
    index = arguments[0].get_device()
    forms = [id(kernel), programs, index, *options.items()]
    for one in arguments:  # in one loop: a function called for each takes as long as the rest
        if isinstance(one, Tensor):
            forms += one.dtype, not one.data_ptr() & 15, one.untyped_storage().nbytes() < 1 << 31
        else:
            forms.append(one)
    form = tuple(forms)
    run = _launched.get(form)
    if run is not None:
        # Triton would look up the device and its stream by four functions
        run(*arguments, stream=torch._C._cuda_getCurrentRawStream(index))
        return
    if len(_launched) >= MOST_FORMS:
        del _launched[next(iter(_launched))]  # the oldest one
    grid = programs if isinstance(programs, tuple) else (programs,)
    compiled = kernel[grid](*arguments, **options)  # None under the interpreter
    if compiled is not None:
        _launched[form] = compiled[(*grid, 1, 1)[:3]]


def call_with_flag(flag: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function whose kernels clear a flag, uint8[1], instead of new ones, which take a launch each."""
    before, _given.flag = getattr(_given, "flag", None), flag
    try:
        return function(*arguments)
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
def number(bits, dtype: tl.constexpr):
    """The float32 or float64 with these bits."""
    if dtype == tl.float64:
        return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)
    else:  # noqa: RET505 - Triton compiles what is behind an `if` whatever its condition
        return tl.cast(bits, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def to_words(mask):
    """bool[words, 64] to int64[words]: element i of a row is bit i."""
    return tl.sum(mask.to(tl.int64) << tl.arange(0, 64)[None, :].to(tl.int64), axis=1)


@triton.jit
def to_bits(words):
    """int64[words] to bool[words * 64], the opposite of `to_words`."""
    bits = (words[:, None] >> tl.arange(0, 64)[None, :].to(tl.int64)) & 1
    return tl.reshape(bits, [words.shape[0] * 64]) != 0


@triton.jit
def bit_at(words, at, inside):
    """Bit `at`, an int64 tensor, of packed words, as bool; false where not `inside`."""
    return ((tl.load(words + (at >> 6), mask=inside, other=0) >> (at & 63)) & 1) != 0


@triton.jit
def read_at(pointer, at, inside, whole):
    """Read the elements at some places; zeros where they are not inside, unless all are (`whole`)."""
    if whole:  # noqa: SIM108 - both sides of an expression would be computed
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=inside, other=0)
    return found


@triton.jit
def write_at(pointer, at, inside, whole, values):
    """Write the elements at some places, but for those that are not inside, unless all are (`whole`)."""
    if whole:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=inside)


# A mask that ends anywhere costs all of a program's accesses of 16 bytes. So only the last program has one.


@triton.jit
def read(pointer, start, n, WIDTH: tl.constexpr):
    """WIDTH elements from `start` on; 0 from element n on."""
    at = start + tl.arange(0, WIDTH)
    if start + WIDTH <= n:  # noqa: SIM108 - both sides of an expression would be computed
        found = tl.load(pointer + at)
    else:
        found = tl.load(pointer + at, mask=at < n, other=0)
    return found


@triton.jit
def write(pointer, start, n, values, WIDTH: tl.constexpr):
    """Overwrite WIDTH elements from `start` on, before element n."""
    at = start + tl.arange(0, WIDTH)
    if start + WIDTH <= n:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=at < n)


@triton.jit
def mean_of(total, ranks):
    """Sums divided by the number of ranks, rounded once."""
    # A division takes ten times the instructions of a product, which has the same bits by a power of two.
    if (ranks & (ranks - 1)) == 0:
        found = total * (1.0 / tl.cast(ranks, tl.float64)).to(total.dtype)  # of float32 the quotient would be inexact
    elif total.dtype == tl.float64:
        found = total / tl.cast(ranks, tl.float64)
    else:
        found = tl.div_rn(total, tl.cast(ranks, tl.float32))
    return found


@triton.jit
def keep_mean(total, ranks, mean, start, n, finite, WIDTH: tl.constexpr):
    """Overwrite WIDTH elements of a mean, given sums; finite : 0 is written where not all of it is."""
    value = mean_of(total, ranks)
    write(mean, start, n, value, WIDTH)
    tl.store(finite, 0, mask=tl.max((value - value != 0).to(tl.int32)) > 0)


@triton.jit
def read_bits(words, start, n, WIDTH: tl.constexpr):
    """Bits of WIDTH elements from `start` on, a multiple of 64, as bool; false from element n on, up to its word."""
    word = start // 64 + tl.arange(0, WIDTH // 64)
    return to_bits(tl.load(words + word, mask=word * 64 < n, other=0))


@triton.jit
def fold(lanes):
    """Sum of 16 lanes, [blocks, 16] to [blocks], halves first: l0 + l8, ..., then l0 + l4, ... as on the CPU."""
    blocks: tl.constexpr = lanes.shape[0]
    eight = tl.sum(tl.reshape(lanes, [blocks, 2, 8]), axis=1)
    four = tl.sum(tl.reshape(eight, [blocks, 2, 4]), axis=1)
    two = tl.sum(tl.reshape(four, [blocks, 2, 2]), axis=1)
    return tl.sum(two, axis=1)


# Stretches of a vector that have a number each, as in `mpicomp.feedback.scale_groups.ScaleGroups` ---------------------


@lru_cache(maxsize=256)
def _cached(table: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(table), dtype=torch.int64).to(device)


def places_on(device: torch.device, places: NDArray[np.int64] | Tensor) -> Tensor:
    """An int64 table on the device. An array is copied there and kept: long tables are better given as tensors."""
    if isinstance(places, Tensor):
        return places
    if not places.size:
        return torch.empty(0, dtype=torch.int64, device=device)
    return _cached(np.ascontiguousarray(places, np.int64).tobytes(), device)
