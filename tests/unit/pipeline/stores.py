"""Helpers for tests of all stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomp.pipeline import Store


def rows_of(*values: float, shape: tuple[int, ...] = (2, 3)) -> Any:
    """Messages that hold one value each."""
    return np.stack([np.full(shape, value, np.float32) for value in values])


def visited(store: Store) -> Store:
    """Return the store after writes to rows 1 and 3, and another to row 3."""
    store.write([1, 3], rows_of(1.0, 3.0))
    store.write([3], rows_of(3.5))
    return store
