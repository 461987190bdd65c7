"""A process group of all ranks, which ends with the test."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from mpi4py import MPI

from mpicomp.torch import register_backend
from tests.mpi.lanes import TIMEOUT_S


@pytest.fixture
def group(mpi_comm: MPI.Intracomm) -> Iterator[dist.ProcessGroup]:
    """Return the default process group."""
    register_backend()
    dist.init_process_group("mpicomp", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
