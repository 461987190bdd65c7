"""Sums on devices, by PyTorch: in what order is the caller's business, and so are streams."""

from __future__ import annotations

from functools import cache
from typing import Any

OPERATIONS = {"sum": "add", "mean": "add", "min": "minimum", "max": "maximum"}
"""PyTorch's names of what `collectives.memory.COMBINE` has for the host."""


@cache
def _torch() -> Any:
    import torch

    return torch


def as_type(vector: Any, dtype: str) -> Any:
    """A vector on the same memory, of a type of PyTorch's."""
    return vector.view(getattr(_torch(), dtype))


def combine(op: str, held: Any, incoming: Any, out: Any) -> None:
    """Overwrite `out` with the sum, minimum or maximum of two vectors; what overflows is infinite, NaN stays NaN."""
    getattr(_torch(), OPERATIONS[op])(held, incoming, out=out)


def divide(vector: Any, divisor: Any) -> None:
    """Divide in place by a vector of one element; by a number of the host PyTorch multiplies with its reciprocal."""
    _torch().div(vector, divisor, out=vector)
