"""Tensors as codecs make, view and convert them: see `mpicomp.kernels.cpu.arrays`.

Of unsigned integers of more than 8 bits tensors hold the bits, in signed ones.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mpicomp.kernels.gpu.common import clearing

__all__ = ["clearing", "convert", "divide", "empty", "view", "xp"]

xp = torch


def _type(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found: torch.dtype = getattr(torch, dtype if dtype == "uint8" else dtype.removeprefix("u"))
    return found


def empty(like: Tensor, n: int, dtype: str | torch.dtype) -> Tensor:
    """A vector where `like` is."""
    return torch.empty(n, dtype=_type(dtype), device=like.device)


def view(array: Tensor, dtype: str | torch.dtype) -> Tensor:
    """The same memory as elements of another type."""
    return array.view(_type(dtype))


def convert(array: Tensor, dtype: str | torch.dtype) -> Tensor:
    """Elements as another type, each rounded once; the array itself if it has that."""
    return array.to(_type(dtype))


@lru_cache(maxsize=64)
def _number(value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def divide(array: Tensor, divisor: int) -> None:
    """Divide by a number of the array's type, rounding once. `array` is overwritten.

    By a number of the host's PyTorch would multiply with its reciprocal, which rounds twice.
    """
    array.div_(_number(divisor, array.dtype, array.device))
