"""DistributedDataParallel over gloo, with our hook or without, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from mpicomp.torch import DDPHookState, ddp_hook
from tests.mpi.lanes import TIMEOUT_S

VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}
SMALL_BUCKETS: dict[str, Any] = {"bucket_cap_mb": 0.0004}


@contextmanager
def process_group(mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[None]:
    """The default process group of these ranks, over gloo."""
    store = dist.FileStore(str(folder / "store"), mpi_comm.size)
    patience = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=mpi_comm.rank, world_size=mpi_comm.size, timeout=patience)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hooked(
    module: nn.Module, algorithm: Any, comm: Communicator, **options: Any
) -> tuple[DistributedDataParallel, DDPHookState]:
    """The module under DDP with our hook, and the hook's state."""
    model = DistributedDataParallel(module, **options)
    state, hook = ddp_hook(algorithm, comm, model)
    model.register_comm_hook(state, hook)
    return model, state


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a memory."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
