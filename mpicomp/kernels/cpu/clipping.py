"""The leading bits of float32 numbers: whole bytes as columns, the rest as bit planes."""

from __future__ import annotations

import numpy as np
from numba import njit, uint8, uint32


@njit(nogil=True, cache=True)
def split_bytes(words, columns):  # type: ignore[no-untyped-def]
    """Column j has byte j, the highest first, of each word. words : uint32[n]; columns : uint8[k, n], overwritten."""
    for j in range(columns.shape[0]):
        shift = uint32(24 - 8 * j)
        for i in range(words.size):
            columns[j, i] = uint8((words[i] >> shift) & uint32(255))


@njit(nogil=True, cache=True)
def join_bytes(columns, words):  # type: ignore[no-untyped-def]
    """The opposite of `split_bytes`; bytes that are not there are 0. words : overwritten."""
    for i in range(words.size):
        words[i] = np.uint32(0)
    for j in range(columns.shape[0]):
        shift = uint32(24 - 8 * j)
        for i in range(words.size):
            words[i] |= uint32(columns[j, i]) << shift
