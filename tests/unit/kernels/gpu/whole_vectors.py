"""Kernels of blocks of many tensors, as calls for one vector with the parameters of `mpicomp.kernels.cpu.sign`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apps.performance.gpu_blocks import scale_rows, whole_blocks
from mpicomp.kernels.gpu.sign_blocks import add_and_clear_blocks, encode_blocks, subtract_blocks


def encode(
    u: Tensor,
    whole: Tensor | None,
    residual: Tensor | None,
    left: Tensor | None,
    bits: Tensor,
    step: Any,
    limit: Any,
    previous: Any,
    odd_positive: bool,
    zero: Any,
    tiny: Any,
    sums: Tensor,
) -> Tensor:
    if whole is not None:
        u = whole - u
        if residual is not None and residual.numel() > u.numel():
            u = torch.nn.functional.pad(u, (0, residual.numel() - u.numel()))
    blocks = whole_blocks(u.numel(), u.device)
    reports = torch.zeros((blocks.n_blocks, 2), dtype=torch.int64, device=u.device)
    lazy = previous is not None
    scales = scale_rows(u, step, limit, previous)
    encode_blocks(u, residual, left, bits, blocks, scales, lazy, odd_positive, reports)
    sums.copy_(reports[:, 0].view(torch.float64))
    return reports[:, 1].sum()


def add_and_clear(
    u: Tensor,
    residual: Tensor | None,
    left: Tensor | None,
    bits: Tensor,
    previous: Any,
    out: Tensor | None,
    sums: Tensor,
) -> None:
    blocks = whole_blocks(u.numel(), u.device)
    reports = torch.zeros((blocks.n_blocks, 2), dtype=torch.int64, device=u.device)
    scales = scale_rows(u, 0, 0, previous)
    add_and_clear_blocks(u, residual, left, bits, blocks, scales, previous is not None, out, reports)
    sums.copy_(reports[:, 0].view(torch.float64))


def subtract_result(x: Tensor, bits: Tensor, step: Any) -> None:
    subtract_blocks(x, bits, whole_blocks(x.numel(), x.device), scale_rows(x, 0, 0, step))
