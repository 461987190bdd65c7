"""Top-k of chunks, packed places, four levels of what is kept, and drawn strata in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.stochastic_signs import uniforms

Places = NDArray[np.int64]
FLOAT32_MAX = float(np.finfo(np.float32).max)


def chunks(n: int, chunk: int) -> list[slice]:
    """Of `chunk` elements each, but the last."""
    return [slice(start, min(n, start + chunk)) for start in range(0, n, chunk)]


def count(length: int, chunk: int, keep: int) -> int:
    """Kept of a chunk of this length."""
    return -(-keep * length // chunk)


def top(x: NDArray[Any], chunk: int, keep: int) -> Places:
    """Places in the vector of the largest of each chunk, ascending; of equal ones the first."""
    found = []
    for part in chunks(x.size, chunk):
        order = np.argsort(-np.abs(x[part]), kind="stable")
        found.append(part.start + np.sort(order[: count(part.stop - part.start, chunk, keep)]))
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def within_chunks(places: Places, n: int, chunk: int, keep: int) -> NDArray[np.uint32]:
    """Places within their chunks."""
    starts = [np.full(count(part.stop - part.start, chunk, keep), part.start) for part in chunks(n, chunk)]
    return (places - np.concatenate([*starts, np.zeros(0, np.int64)])).astype(np.uint32)


def in_order(terms: NDArray[np.float64]) -> np.float64:
    """Sum in float64, one term after the other."""
    return np.add.accumulate(terms)[-1]


def four_levels(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return the level of each value of a tensor."""
    v = np.clip(values.astype(np.float64), -FLOAT32_MAX, FLOAT32_MAX)
    mean = in_order(v) / v.size
    c = v - mean
    scale = 6 * np.sqrt(in_order(c * c) / v.size) / 4 or 1.0
    q = np.clip(np.rint(c / scale + 2), 0, 3).astype(int)
    table = [in_order(c[q == j]) / np.count_nonzero(q == j) if (q == j).any() else 0.0 for j in range(4)]
    return np.clip(mean + np.array(table)[q], -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)


def largest_in_levels(p: NDArray[Any], rate: int, chunk: int, bits: int) -> NDArray[Any]:
    """Return what a tensor's codes decode to: the largest elements of each chunk, in 2 or 32 bits."""
    places, out = top(p, chunk, chunk // rate), np.zeros_like(p)
    if places.size:
        out[places] = four_levels(p[places]) if bits == 2 else np.clip(p[places], -FLOAT32_MAX, FLOAT32_MAX)
    return out.astype(np.float32).astype(p.dtype)


def strata(key: tuple[int, int], n: int, chunk: int, step: int) -> Places:
    """One place of each chunk: the 32-bit word of its number, times its length, div 2^32."""
    parts = chunks(n, chunk)
    words = uniforms(key, 0, len(parts), step, 0).astype(np.uint64)
    return np.array(
        [part.start + (int(word) * (part.stop - part.start) >> 32) for part, word in zip(parts, words, strict=True)],
        np.int64,
    )
