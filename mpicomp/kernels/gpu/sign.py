"""Signs to bits and back: one bit per element, element i is bit i mod 64 of word i div 64.

Sums have the order that `mpicomp.kernels.cpu.sign` gives them: a program adds the words of a few blocks one after the
other, 16 lanes a block; the elements behind the last whole word are added one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.cpu.sign import add_up, follow, set_steps
from mpicomp.kernels.gpu.common import (
    APART,
    BLOCK,
    LANES,
    bits_of,
    elements,
    fold,
    keep_elements,
    number,
    read,
    read_bits,
    signed,
    to_bits,
    to_words,
    write,
)
from mpicomp.kernels.gpu.sums import STAGES, TURN, add_columns, add_rows

__all__ = [
    "add_and_clear", "add_up", "all_finite", "all_finite_16", "encode", "follow", "pack", "set_steps",
    "subtract_result", "unpack",
]  # fmt: skip

WORDS = 16  # words of a program that packs
WIDTH = 1024  # elements of any other program


@triton.jit
def _values(u, whole, at, n, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of u, or of whole - u; 0 behind the end."""
    x = elements(u, at, n, WHOLE)
    if whole is not None:
        x = elements(whole, at, n, WHOLE) - x
    return x


@triton.jit
def _sum_one_by_one(u, whole, start, stop):  # type: ignore[no-untyped-def]
    """Sum of the magnitudes of some elements, float64[1]."""
    total = tl.zeros([1], tl.float64)
    for first in range(start, stop, LANES):
        at = tl.cast(first, tl.int64) + tl.arange(0, LANES)[None, :]
        total = add_columns(total, tl.abs(_values(u, whole, at, stop, False)).to(tl.float64))
    return total


@triton.jit
def _store_sum(lanes, rest, start, n, sums):  # type: ignore[no-untyped-def]
    """Sum of the block from element `start` on; `rest` belongs to the block of element n - 1."""
    is_last = start + BLOCK >= n
    total = fold(tl.reshape(lanes, [1, LANES])) + tl.where(is_last, rest, 0)
    at = start // BLOCK + tl.arange(0, 1)
    tl.store(sums + at, total, mask=at * BLOCK < n)


@triton.jit
def _turns(start, whole_until, stop):  # type: ignore[no-untyped-def]
    """How many turns of a block are whole, and how many it has up to `stop`."""
    room = tl.maximum(tl.minimum(whole_until - start, BLOCK), 0)
    return (room // TURN).to(tl.int32), tl.cdiv(tl.minimum(stop - start, BLOCK), TURN).to(tl.int32)


@triton.jit
def _positive(x, at, ODD_POSITIVE: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x > 0) | ((x == 0) & ((at & 1) == ODD_POSITIVE))


@triton.jit
def _encode_turn(  # type: ignore[no-untyped-def]
    u, whole, residual, bits, n, size, full, step, limit, least, previous, first, lanes, noted,
    ODD_POSITIVE: tl.constexpr, LAZY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """noted : NaN where something may overflow (LAZY), else how often elements of these columns were clipped."""
    at = first + tl.arange(0, TURN)
    word = first // 64 + tl.arange(0, TURN // 64)
    x = _values(u, whole, at, n, WHOLE)
    magnitude = tl.abs(x) if WHOLE else tl.where(at < full, tl.abs(x), 0)
    if residual is None:
        positive = _positive(x, at, ODD_POSITIVE)
    else:
        c = elements(residual, at, size, WHOLE)
        own = number(step, x.dtype)
        if LAZY:
            last = number(previous, x.dtype)
            old = tl.load(bits + word) if WHOLE else tl.load(bits + word, mask=word * 64 < size, other=0)
            x = x + tl.where(to_bits(old), c - last, c + last)
            positive = x >= 0
            # nothing bounds x, nor x less the coming result: NaN where one of them may overflow
            most = tl.abs(x) + own
            noted += most - most if WHOLE else tl.where(at < size, most - most, 0)
        else:
            x = x + c
            positive = x >= 0
            x = tl.where(positive, x - own, x + own)
            most, least_kept = number(limit, x.dtype), number(least, x.dtype)
            bounded = tl.where(x > most, most, x)
            bounded = tl.where(bounded < least_kept, least_kept, bounded)
            if WHOLE:
                beyond = (x > most) | (x < least_kept) | (x != x)
            else:
                beyond = ((x > most) | (x < least_kept) | ((at < full) & (x != x))) & (at < size)
            noted += beyond.to(tl.int32)
            x = bounded
        keep_elements(residual, at, size, x, WHOLE)
    lanes = add_rows(lanes, tl.reshape(magnitude, [1, TURN]))
    packed = to_words(tl.reshape(positive if WHOLE else positive & (at < size), [TURN // 64, 64]))
    if WHOLE:
        tl.store(bits + word, packed)
    else:
        tl.store(bits + word, packed, mask=word * 64 < size)
    return lanes, noted


@triton.jit(do_not_specialize=["step", "limit", "least", "previous"])
def _encode_kernel(  # type: ignore[no-untyped-def]
    u, whole, residual, bits, n, size, full, step, limit, least, previous, sums, clipped,
    ODD_POSITIVE: tl.constexpr, LAZY: tl.constexpr,
):  # fmt: skip
    """`size` : elements with a bit. `full` : elements whose magnitudes are added in lanes."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    rest = _sum_one_by_one(u, whole, full, tl.where(start + BLOCK >= n, n, full))
    lanes = tl.zeros([LANES], tl.float64)
    noted = tl.zeros([TURN], u.dtype.element_ty if LAZY else tl.int32)
    whole_turns, turns = _turns(start, tl.minimum(n, full), size)
    for turn in tl.range(0, whole_turns, num_stages=STAGES):
        lanes, noted = _encode_turn(
            u, whole, residual, bits, n, size, full, step, limit, least, previous, start + turn * TURN, lanes, noted,
            ODD_POSITIVE, LAZY, True,
        )  # fmt: skip
    for turn in range(whole_turns, turns):
        lanes, noted = _encode_turn(
            u, whole, residual, bits, n, size, full, step, limit, least, previous, start + turn * TURN, lanes, noted,
            ODD_POSITIVE, LAZY, False,
        )  # fmt: skip
    if LAZY:
        lanes = lanes + tl.sum(noted).to(tl.float64)
    _store_sum(lanes, rest, start, n, sums)
    if clipped is not None:
        count = tl.sum(noted).to(tl.int64)
        tl.atomic_add(clipped, count, mask=count > 0, sem="relaxed")


def encode(
    u: Tensor,
    whole: Tensor | None,
    residual: Tensor | None,
    bits: Tensor,
    step: Any,
    limit: Any,
    previous: Any,
    odd_positive: bool,
    zero: Any,
    tiny: Any,
    sums: Tensor,
    clipped: Tensor | None = None,
) -> Tensor:
    """Add the residual, take signs, pack them, leave the new residual: one pass.

    Parameters
    ----------
    u : float32[n] or float64[n]
    whole : like u, or None
        The values are whole - u, and may be fewer than the residual, by less than a word: zeros follow them.
        None: they are `u`.
    residual : like u, or None
        Overwritten. None: the signs of `u` itself, zeros alternating.
    bits : int64[ceil(n / 64)]
        Overwritten. With `previous`, holds the last result's bits on entry.
    step, limit : scalars like u
        Rule "own": residual <- clip(w - step sgn(w), -limit, limit), w = u + residual.
    previous : scalar like u, or None
        Rule "paper", lazily: w = u + (residual - previous * last result), residual <- w.
    odd_positive : bool
        Without a residual: whether zeros at odd indices (else at even ones) count as positive.
    zero, tiny : scalars like u
        Not used.
    sums : float64[ceil(n / 4096)]
        Overwritten: sum of |u| per block; not finite where `u` is not, or with `previous` where |w| + step is not.
    clipped : int64[1], optional
        How many elements were clipped is added to it, in the same launch.

    Returns
    -------
    int64[]
        How many elements were clipped: at this call, or where `clipped` is given, what that has now.
    """
    if clipped is None:
        clipped = torch.zeros(1, dtype=torch.int64, device=u.device)
    if not (n := u.numel()):
        return clipped.view(())
    lazy = residual is not None and previous is not None
    clips = residual is not None and previous is None
    size, full = n, n // 64 * 64
    if whole is not None and residual is not None and residual.numel() > n:
        size = full = residual.numel()
    dtype = u.dtype
    scalars = (0, 0, 0) if residual is None else (bits_of(step, dtype), bits_of(limit, dtype), bits_of(-limit, dtype))
    last = bits_of(previous, dtype) if lazy else 0
    _encode_kernel[(triton.cdiv(n, streams.BLOCK),)](
        u, whole, residual, bits, n, size, full, *scalars, last, sums, clipped if clips else None,
        int(odd_positive), lazy, num_warps=1, **APART
    )  # fmt: skip
    return clipped.view(())


@triton.jit
def _pack_kernel(x, n, bits, finite, ODD_POSITIVE: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * (WORDS * 64)
    at = start + tl.arange(0, WORDS * 64)
    v = read(x, start, n, WORDS * 64)
    word = start // 64 + tl.arange(0, WORDS)
    positive = tl.reshape(_positive(v, at, ODD_POSITIVE) & (at < n), [WORDS, 64])
    tl.store(bits + word, to_words(positive), mask=word * 64 < n)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def pack(x: Tensor, bits: Tensor, odd_positive: bool, zero: Any, tiny: Any) -> Tensor:
    """Signs of x as bits, zeros alternating as in `encode`; returns whether all of x is finite, bool[].

    x : float32[n] or float64[n]; bits : int64[ceil(n / 64)], overwritten. zero, tiny : not used.
    """
    finite = torch.ones((), dtype=torch.uint8, device=x.device)
    if n := x.numel():
        _pack_kernel[(triton.cdiv(n, 64 * WORDS),)](x, n, bits, finite, int(odd_positive), WORDS, **APART)
    return finite.view(torch.bool)


@triton.jit(do_not_specialize=["positive", "negative"])
def _unpack_kernel(bits, positive, negative, n, out, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * WIDTH
    value = tl.where(read_bits(bits, start, n, WIDTH), tl.cast(positive, tl.int64), tl.cast(negative, tl.int64))
    write(out, start, n, value.to(out.dtype.element_ty), WIDTH)


def unpack(bits: Tensor, positive: np.generic, negative: np.generic, streaming: bool, out: Tensor) -> None:
    """out[i] = positive where bit i is 1, else negative.

    bits : int64[ceil(n / 64)]. positive, negative : the two values as unsigned integers of out's width, so that one
    kernel writes every float type. streaming : not used. out : signed integers [n] of 16, 32 or 64 bits, overwritten.
    """
    if n := out.numel():
        _unpack_kernel[(triton.cdiv(n, WIDTH),)](bits, signed(positive), signed(negative), n, out, WIDTH, **APART)


@triton.jit
def _all_finite_kernel(x, n, finite, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    v = read(x, tl.program_id(0).to(tl.int64) * WIDTH, n, WIDTH)
    tl.store(finite, 0, mask=tl.max((v - v != 0).to(tl.int32)) > 0)


def all_finite(x: Tensor) -> Tensor:
    """Whether x, float32[n] or float64[n], has neither NaN nor infinity; bool[]."""
    finite = torch.ones((), dtype=torch.uint8, device=x.device)
    if n := x.numel():
        _all_finite_kernel[(triton.cdiv(n, WIDTH),)](x, n, finite, WIDTH, **APART)
    return finite.view(torch.bool)


@triton.jit
def _all_finite_16_kernel(  # type: ignore[no-untyped-def]
    bits, n, finite, EXPONENT: tl.constexpr, WIDTH: tl.constexpr
):
    code = read(bits, tl.program_id(0).to(tl.int64) * WIDTH, n, WIDTH).to(tl.int32)
    tl.store(finite, 0, mask=tl.max(((code & EXPONENT) == EXPONENT).to(tl.int32)) > 0)


def all_finite_16(bits: Tensor, exponent: np.uint16) -> Tensor:
    """Whether 16-bit floats, int16[n], have neither NaN nor infinity; bool[]. exponent : the bits that it takes."""
    finite = torch.ones((), dtype=torch.uint8, device=bits.device)
    if n := bits.numel():
        _all_finite_16_kernel[(triton.cdiv(n, WIDTH),)](bits, n, finite, int(exponent), WIDTH, **APART)
    return finite.view(torch.bool)


@triton.jit
def _add_and_clear_turn(  # type: ignore[no-untyped-def]
    u, residual, bits, previous, n, full, out, first, lanes, LAZY: tl.constexpr, WHOLE: tl.constexpr
):
    at = first + tl.arange(0, TURN)
    x = elements(u, at, n, WHOLE)
    magnitude = tl.abs(x) if WHOLE else tl.where(at < full, tl.abs(x), 0)
    if residual is not None:
        c = elements(residual, at, n, WHOLE)
        if LAZY:
            last = number(previous, x.dtype)
            word = first // 64 + tl.arange(0, TURN // 64)
            old = tl.load(bits + word) if WHOLE else tl.load(bits + word, mask=word * 64 < n, other=0)
            c = tl.where(to_bits(old), c - last, c + last)
        x = x + c
        keep_elements(residual, at, n, tl.zeros_like(x), WHOLE)
    if out is not None:
        keep_elements(out, at, n, x, WHOLE)
    return add_rows(lanes, tl.reshape(magnitude, [1, TURN]))


@triton.jit(do_not_specialize=["previous"])
def _add_and_clear_kernel(  # type: ignore[no-untyped-def]
    u, residual, bits, previous, n, full, out, sums, LAZY: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # before the turns, which may write to u
    rest = _sum_one_by_one(u, None, full, tl.where(start + BLOCK >= n, n, full))
    lanes = tl.zeros([LANES], tl.float64)
    whole_turns, turns = _turns(start, full, n)
    for turn in tl.range(0, whole_turns, num_stages=STAGES):
        lanes = _add_and_clear_turn(
            u, residual, bits, previous, n, full, out, start + turn * TURN, lanes, LAZY, True
        )  # fmt: skip
    for turn in range(whole_turns, turns):
        lanes = _add_and_clear_turn(
            u, residual, bits, previous, n, full, out, start + turn * TURN, lanes, LAZY, False
        )  # fmt: skip
    _store_sum(lanes, rest, start, n, sums)


def add_and_clear(
    u: Tensor, residual: Tensor | None, bits: Tensor, previous: Any, out: Tensor | None, sums: Tensor
) -> None:
    """A full-precision round's input: out = u + residual, residual = 0, and sums of |u| per block of 4096.

    residual : like u, or None. bits, previous : as in `encode`; `previous` None: nothing is pending. out : like u,
    overwritten, and may be u; None without a residual: the sums alone. sums : float64[ceil(n / 4096)], overwritten.
    """
    if n := u.numel():
        lazy = residual is not None and previous is not None
        last = bits_of(previous, u.dtype) if lazy else 0
        _add_and_clear_kernel[(triton.cdiv(n, streams.BLOCK),)](
            u, residual, bits, last, n, n // 64 * 64, out, sums, lazy, num_warps=1, **APART
        )


@triton.jit(do_not_specialize=["step"])
def _subtract_result_kernel(x, bits, step, n, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    start = tl.program_id(0).to(tl.int64) * WIDTH
    v, own = read(x, start, n, WIDTH), number(step, x.dtype.element_ty)
    write(x, start, n, tl.where(read_bits(bits, start, n, WIDTH), v - own, v + own), WIDTH)


def subtract_result(x: Tensor, bits: Tensor, step: Any) -> None:
    """x -= step where bit i is 1, x += step elsewhere. x : float32[n] or float64[n]; bits : int64[ceil(n / 64)]."""
    if n := x.numel():
        _subtract_result_kernel[(triton.cdiv(n, WIDTH),)](x, bits, bits_of(step, x.dtype), n, WIDTH, **APART)
