"""Top-k of chunks, packed places and drawn strata in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.stochastic_signs import uniforms

Places = NDArray[np.int64]


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


def strata(key: tuple[int, int], n: int, chunk: int, step: int) -> Places:
    """One place of each chunk: the 32-bit word of its number, times its length, div 2^32."""
    parts = chunks(n, chunk)
    words = uniforms(key, 0, len(parts), step, 0).astype(np.uint64)
    return np.array(
        [part.start + (int(word) * (part.stop - part.start) >> 32) for part, word in zip(parts, words, strict=True)],
        np.int64,
    )
