"""Counts as bit planes: added word by word, compared with half of all, and turned into values.

The layout is that of `mpicomp.kernels.cpu.vote_counts`, in int64 tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.gpu.common import (
    APART,
    bits_of,
    number,
    numbers_at,
    numbers_on,
    places_on,
    read,
    read_bits,
    write,
)

WIDTH = 1024  # words or elements of a program


@triton.jit(do_not_specialize=["both", "most", "planes"])
def _add_counts_kernel(incoming, held, both, most, planes, words, LONGER: tl.constexpr, WIDTH: tl.constexpr):
    """Ripple-carry addition of 64 counts a word. LONGER : whether `incoming` has more planes than `held`."""
    start = tl.program_id(0).to(tl.int64) * WIDTH
    source, to = incoming, held
    carry = tl.zeros([WIDTH], tl.int64)
    for _ in range(both):
        a, b = read(source, start, words, WIDTH), read(to, start, words, WIDTH)
        half = a ^ b
        write(to, start, words, half ^ carry, WIDTH)
        carry = (a & b) | (half & carry)
        source += words
        to += words
    for _ in range(both, most):
        a = read(source if LONGER else to, start, words, WIDTH)
        write(to, start, words, a ^ carry, WIDTH)
        carry = a & carry
        source += words
        to += words
    if planes > most:
        write(to, start, words, carry, WIDTH)


def add_counts(incoming: Tensor, incoming_planes: int, held: Tensor, held_planes: int, planes: int, words: int) -> None:
    if words:
        both, most = min(incoming_planes, held_planes), max(incoming_planes, held_planes)
        longer = bool(incoming_planes > held_planes)
        _add_counts_kernel[(triton.cdiv(words, WIDTH),)](
            incoming, held, int(both), int(most), int(planes), int(words), longer, WIDTH, **APART
        )


@triton.jit(do_not_specialize=["lowest", "first", "low", "high"])
def _values_kernel(
    counts, planes, words, lowest, factors, starts, stops, first, low, high, n, out, WIDTH: tl.constexpr
):
    start = tl.program_id(0).to(tl.int64) * WIDTH
    kind = out.dtype.element_ty
    total = tl.zeros([WIDTH], kind) + number(lowest, kind)
    power = tl.full((), 2, kind)
    plane = counts
    for _ in range(planes):
        total += tl.where(read_bits(plane, start, n, WIDTH), power, 0)
        power += power
        plane += words
    factor, found = numbers_at(factors, starts, stops, low, high, first + start + tl.arange(0, WIDTH))
    write(out, start, n, tl.where(found, total * factor, 0), WIDTH)


def few_values(
    counts: Tensor, planes: int, words: int, powers: NDArray[Any] | None, lowest: Any, factors: NDArray[Any] | Tensor,
    starts: NDArray[np.int64] | Tensor, stops: NDArray[np.int64] | Tensor, first: int, low: int, high: int,
    streaming: bool, out: Tensor,
) -> None:  # fmt: skip
    if n := out.numel():
        numbers = numbers_on(out.device, factors)
        places = places_on(out.device, starts), places_on(out.device, stops)
        _values_kernel[(triton.cdiv(n, WIDTH),)](
            counts, int(planes), int(words), bits_of(lowest, out.dtype), numbers, *places, int(first), int(low),
            int(high), n, out, WIDTH, **APART,
        )  # fmt: skip


many_values = few_values
