"""Tensors that every rank can compute for every other rank, and the results of reducing them."""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
COMBINE = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
TYPES = {
    "SUM": (torch.bool, *INTEGERS, *FLOATS, *COMPLEX),
    "AVG": (*INTEGERS, *FLOATS, *COMPLEX),
    "PRODUCT": (torch.bool, *INTEGERS, *FLOATS),
    "MIN": (torch.bool, *INTEGERS, *FLOATS),
    "MAX": (torch.bool, *INTEGERS, *FLOATS),
    "BAND": (torch.bool, *INTEGERS),
    "BOR": (torch.bool, *INTEGERS),
    "BXOR": (torch.bool, *INTEGERS),
}


def of_rank(rank: int, n: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums and products of a few every dtype holds exactly."""
    chance = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 3, (n,), generator=chance).to(dtype)


def reduced(op: str, n: int, dtype: torch.dtype) -> Tensor:
    """Return the reduction of all ranks' tensors."""
    size = dist.get_world_size()
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = reduce(COMBINE[op], [of_rank(rank, n, dtype).to(wide) for rank in range(size)])
    if op == "AVG":
        total = torch.div(total, size, rounding_mode=None if dtype.is_floating_point or dtype.is_complex else "trunc")
    return total.to(dtype)
