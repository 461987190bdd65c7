"""Tables for kernels of blocks of many tensors, for a single tensor: as `gpu_calls` times them, and tests call them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpicomp.kernels import streams
from mpicomp.kernels.gpu.common import bits_of, places_on
from mpicomp.kernels.gpu.sign_blocks import BlockRows


def whole_blocks(n: int, device: torch.device) -> BlockRows:
    """Return the blocks of a tensor, counted from its first element."""
    begins = np.arange(0, n, streams.BLOCK)
    rows = np.stack([begins, np.minimum(begins + streams.BLOCK, n), 0 * begins, begins // 64], axis=1)
    return BlockRows(places_on(device, rows.reshape(-1)), 0, len(rows), n % 64 == 0)


def scale_rows(like: Tensor, step: Any, limit: Any, previous: Any) -> Tensor:
    """Return the scales of a tensor; those of the signs' values are 0."""
    numbers = (step, limit, -limit, 0 if previous is None else previous)
    row = np.array([*(bits_of(one, like.dtype) for one in numbers), 0, 0], np.int64)
    return torch.from_numpy(row).to(like.device)
