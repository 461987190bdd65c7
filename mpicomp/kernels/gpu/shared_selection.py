"""Latin selection: all ranks draw the same winner of each element; see `mpicomp.kernels.cpu.shared_selection`.

A rank's row, and a row's payload, is picked label by label, as many steps as there are ranks: the words that this reads
again are those of one group, in the caches.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from mpicomp.kernels.gpu.common import APART
from mpicomp.kernels.gpu.philox import bernoulli_pair, draw, key_of, table_arguments

ROW = 8  # words
BLOCKS = 128  # Philox blocks of a program that draws labels, two words each
WIDTH = 256  # numbers of any other program


@triton.jit(do_not_specialize=["key", "first", "step", "source", "aliases", "low", "high", "m", "k"])
def _draw_labels_kernel(
    key, first, step, source, aliases, low, high, rest, m, k, planes, pitch, undecided, labels,
    ODD: tl.constexpr, FIRST: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One draw, which sets bit k of the undecided labels, or decides some of them; FIRST: none has been decided."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    lower, upper = bernoulli_pair(key, first + block, step, source, aliases, low, high, rest)
    drawn = tl.join(lower, upper).to(tl.int64, bitcast=True)
    at = (((block >> 2) << 3) + (block & 3))[:, None] + 4 * tl.arange(0, 2)[None, :]
    inside = at < pitch
    left = tl.full(drawn.shape, -1, tl.int64) if FIRST else tl.load(undecided + at, mask=inside, other=0)
    drawn = drawn & left
    if ODD:
        tl.store(undecided + at, left ^ drawn, mask=inside)
        for plane in range(k, planes):
            label = tl.where(((m >> (plane - k)) & 1) != 0, drawn, 0)
            to = labels + tl.cast(plane, tl.int64) * pitch + at
            if not FIRST:
                label = label | tl.load(to, mask=inside, other=0)
            tl.store(to, label, mask=inside)
    else:
        to = labels + tl.cast(k, tl.int64) * pitch + at
        if not FIRST:
            drawn = drawn | tl.load(to, mask=inside, other=0)
        tl.store(to, drawn, mask=inside)


def draw_labels(
    schedule: NDArray[np.uint64], first_group: Any, step: Any, sources: NDArray[np.uint64], tables: NDArray[np.uint8],
    rests: NDArray[np.uint64], ranks: int, scratch: Tensor | None, labels: Tensor,
) -> None:  # fmt: skip
    planes = (ranks - 1).bit_length()
    pitch = labels.numel() // max(planes, 1)
    if not pitch:
        return
    undecided = torch.empty(pitch, dtype=torch.int64, device=labels.device)
    key, first = key_of(schedule), 4 * int(first_group)
    m, k, decided = ranks, 0, 0
    for source in sources:
        odd = m % 2 == 1
        m -= odd
        table, rest = (tables[decided], rests[decided]) if odd else (tables[:0], rests[:0])
        arguments = table_arguments(table, rest, labels.device)
        _draw_labels_kernel[(triton.cdiv(pitch, 2 * BLOCKS),)](
            key, first, int(step), int(source), *arguments, m, k, planes, pitch, undecided, labels,
            odd, decided == 0, BLOCKS, **APART
        )  # fmt: skip
        if odd:
            decided += 1
        else:
            m, k = m // 2, k + 1


@triton.jit(do_not_specialize=["key", "first", "step", "source"])
def _draw_distances_kernel(key, first, step, source, ranks, n, distances, WIDTH: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x0, _, _, _ = draw(key, first + at, 0, step, source)
    tl.store(distances + at, 1 + ((x0.to(tl.int64) * (ranks - 1)) >> 32), mask=at < n)


def draw_distances(
    schedule: NDArray[np.uint64], first_group: Any, step: Any, source: Any, ranks: int, distances: Tensor
) -> None:
    if n := distances.numel():
        _draw_distances_kernel[(triton.cdiv(n, WIDTH),)](
            key_of(schedule), int(first_group), int(step), int(source), ranks, n, distances, WIDTH, **APART
        )


@triton.jit
def _columns_with(label, labels, at, pitch, inside, PLANES: tl.constexpr):
    """Return words whose bits mark the columns with this label, int64 like `at`, the words' places in a plane."""
    columns = tl.full(at.shape, -1, tl.int64)
    for plane in tl.static_range(PLANES):
        bit = (label >> plane) & 1
        columns &= tl.load(labels + plane * pitch + at, mask=inside, other=0) ^ tl.cast(bit - 1, tl.int64)
    return columns


@triton.jit(do_not_specialize=["rank"])
def _select_rows_kernel(
    words, n, labels, pitch, distances, rank, ranks, row_words, n_payload, payload,
    ROW: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`row_words` : words of a row of the last group."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < n_payload
    group = at // ROW
    start = group * ROW * ranks + at % ROW
    length = tl.where(start - at % ROW + ROW * ranks <= n, ROW, row_words)
    row = tl.zeros_like(at) + rank
    if distances is not None:
        row -= tl.load(distances + group, mask=inside, other=0)
        row += tl.where(row < 0, ranks, 0)
    chosen = tl.zeros_like(at)
    for label in range(1 if PLANES == 0 else ranks):
        place = start + row * length
        word = tl.load(words + place, mask=inside & (place < n), other=0)
        chosen |= word & _columns_with(label, labels, at, pitch, inside, PLANES)
        row = tl.where(row == 0, ranks, row) - 1
    tl.store(payload + at, chosen, mask=inside)


def select_rows(
    words: Tensor, labels: Tensor, planes: int, distances: Tensor | None, rank: int, ranks: int, scratch: Tensor | None,
    payload: Tensor,
) -> None:  # fmt: skip
    n, size = words.numel(), triton.cdiv(words.numel(), ranks)
    row_words, pitch = size - n // (ROW * ranks) * ROW, labels.numel() // max(planes, 1)
    for vote in range(1 if distances is None else 2) if n else ():
        _select_rows_kernel[(triton.cdiv(size, WIDTH),)](
            words, n, labels, pitch, distances if vote else None, rank, ranks, row_words, size,
            payload[size * vote :], ROW, planes, WIDTH, **APART
        )  # fmt: skip


@triton.jit
def _scatter_rows_kernel(
    payloads, stride, labels, pitch, distances, ranks, row_words, n, bits,
    ROW: tl.constexpr, PLANES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """`row_words` : words of a row of the last group."""
    to = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = to < n
    group = to // (ROW * ranks)
    length = tl.where((group + 1) * (ROW * ranks) <= n, ROW, tl.maximum(row_words, 1))
    within = to - group * (ROW * ranks)
    at = group * ROW + within % length
    source = within // length
    if distances is not None:
        source += tl.load(distances + group, mask=inside, other=0)
        source -= tl.where(source >= ranks, ranks, 0)
    chosen = tl.zeros_like(to)
    for label in range(1 if PLANES == 0 else ranks):
        word = tl.load(payloads + source * stride + at, mask=inside, other=0)
        chosen |= word & _columns_with(label, labels, at, pitch, inside, PLANES)
        source = tl.where(source + 1 < ranks, source + 1, 0)
    tl.store(bits + to, chosen, mask=inside)


def scatter_rows(
    payloads: Tensor, stride: int, labels: Tensor, planes: int, distances: Tensor | None, ranks: int,
    scratch: Tensor | None, first: Tensor, second: Tensor | None,
) -> None:  # fmt: skip
    n, size = first.numel(), triton.cdiv(first.numel(), ranks)
    row_words, pitch = size - n // (ROW * ranks) * ROW, labels.numel() // max(planes, 1)
    for vote, bits in enumerate((first,) if second is None else (first, second)) if n else ():
        _scatter_rows_kernel[(triton.cdiv(n, WIDTH),)](
            payloads[size * vote :], stride, labels, pitch, distances if vote else None, ranks, row_words, n, bits,
            ROW, planes, WIDTH, **APART
        )  # fmt: skip
