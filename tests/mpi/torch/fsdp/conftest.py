"""Two nodes of two ranks: Gloo within a node, and the communicators of both levels."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from mpi4py import MPI
from torch import distributed as dist

from collectives import Communicator
from tests.mpi.lanes import TIMEOUT_S
from tests.mpi.torch.fsdp.sharded_models import Cluster, cluster


@pytest.fixture
def nodes(mpi_comm: MPI.Intracomm, folder: Path) -> Iterator[Cluster]:
    """Return the nodes, on a default process group over Gloo."""
    store = dist.FileStore(str(folder / "store"), mpi_comm.size)
    patience = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=mpi_comm.rank, world_size=mpi_comm.size, timeout=patience)
    world = Communicator(mpi_comm, topology="ring", timeout=TIMEOUT_S, ranks_per_node=2)
    try:
        with world, cluster(world) as made:
            yield made
    finally:
        dist.destroy_process_group()
