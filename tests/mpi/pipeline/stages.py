"""Small stages and their batch, for tests of pipelines."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives import Communicator
from mpicomp.pipeline import PipelineStage
from mpicomp.pipeline.cut import CutEnd

EXAMPLES, WIDTH, MICRO_BATCHES = 12, 6, 4


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(EXAMPLES, WIDTH, generator=generator), torch.randn(EXAMPLES, WIDTH, generator=generator)


def staged(comm: Communicator, module: nn.Module | None = None, **options: Any) -> PipelineStage:
    loss = nn.functional.mse_loss if comm.rank == comm.size - 1 else None
    return PipelineStage(module or layer(comm.rank), comm, MICRO_BATCHES, loss=loss, **options)


def given(comm: Communicator) -> dict[str, Any]:
    inputs, targets = data()
    return {
        "inputs": inputs if comm.rank == 0 else None,
        "targets": targets if comm.rank == comm.size - 1 else None,
        "ids": np.arange(EXAMPLES),
    }


def fail_store(cut: CutEnd | None) -> None:
    """Have the file of a cut's activations fail, as by its thread on a full disk."""
    assert cut is not None
    coding: Any = cut.codings["activations"]
    coding._store._background._error = OSError(errno.ENOSPC, "the disk is full")
