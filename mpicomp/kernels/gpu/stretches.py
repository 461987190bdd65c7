"""Stretches of a vector that have a number each, as `mpicomp.feedback.scale_groups.ScaleGroups` has them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor


@lru_cache(maxsize=64)
def _cached(table: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(table), dtype=torch.int64).to(device)


def places_on(device: torch.device, places: NDArray[np.int64] | Tensor) -> Tensor:
    """An int64 table on the device. An array is copied there and kept: long tables are better given as tensors."""
    if isinstance(places, Tensor):
        return places
    if not places.size:
        return torch.empty(0, dtype=torch.int64, device=device)
    return _cached(np.ascontiguousarray(places, np.int64).tobytes(), device)


def numbers_on(device: torch.device, numbers: NDArray[Any] | Tensor) -> Tensor:
    """Numbers, one of each stretch, on the device. An array is copied there by each call, which waits for nothing."""
    if isinstance(numbers, Tensor):
        return numbers
    host = torch.tensor(numbers)  # a copy, as the caller may write new numbers while this one crosses
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


@triton.jit
def reaching(stops, low, high, at):  # type: ignore[no-untyped-def]
    """Number of the first stretch from `low` on and before `high` that ends behind element `at`; else `high`."""
    first = tl.cast(low, tl.int64)
    last = tl.cast(high, tl.int64)
    while first < last:
        middle = (first + last) // 2
        behind = tl.load(stops + middle) > at
        last = tl.where(behind, middle, last)
        first = tl.where(behind, first, middle + 1)
    return first


@triton.jit
def numbers_at(numbers, starts, stops, low, high, at, outside):  # type: ignore[no-untyped-def]
    """The number of the stretch that each element is in, and whether it is in one of those from `low` on before `high`.

    at : int64, elements in ascending order. outside : what stands for the number where an element is in none.
    """
    begin, end = tl.min(at), tl.max(at)
    found = tl.full(at.shape, 0, tl.int1)
    taken = tl.zeros(at.shape, numbers.dtype.element_ty) + outside
    stretch = reaching(stops, low, high, begin)
    start = tl.load(starts + stretch, mask=stretch < high, other=0)
    while (stretch < high) & (start <= end):
        inside = (at >= start) & (at < tl.load(stops + stretch))
        taken = tl.where(inside, tl.load(numbers + stretch), taken)
        found = found | inside
        stretch += 1
        start = tl.load(starts + stretch, mask=stretch < high, other=0)
    return taken, found
