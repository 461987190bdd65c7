"""A process group of all ranks, which ends with the test."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from mpi4py import MPI

from mpicomp.torch.process_group import registration
from tests.mpi.lanes import TIMEOUT_S


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that `register_backend` sets, after the test: other tests start programs of their own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # which is as if it was not set, and is undone
    registration.register_backend()


@pytest.fixture
def group(mpi_comm: MPI.Intracomm) -> Iterator[dist.ProcessGroup]:
    """Return the default process group."""
    dist.init_process_group("mpicomp", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield dist.group.WORLD
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
