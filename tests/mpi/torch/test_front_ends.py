"""A model that two wrappers would average."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from mpicomp import Dense, PerNode
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedLion, DistributedOptimizer, OneBitAdam, OneBitLamb, ZeroOneAdam
from tests.mpi.lanes import two_ranks
from tests.mpi.torch.ddp.hooked_models import hooked, process_group, sgd

pytestmark = two_ranks
DENSE = Dense()


def wrapped(model: nn.Module, comm: Communicator, algorithm: Algorithm = DENSE) -> list[str]:
    """Wrap an optimizer of the model's parameters; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedOptimizer(sgd(model), algorithm, comm, model.named_parameters())
    return [str(one.message) for one in caught]


def test_rank_0_warns_of_ddp_that_stays_on(comm: Communicator, mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with process_group(mpi_comm, folder):
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        found = wrapped(ddp, comm)
        assert wrapped(nn.Linear(3, 1), comm) == []
        hooked_model, _ = hooked(nn.Linear(3, 1), Dense(), comm)
        assert wrapped(hooked_model, comm) == []  # its gradients are sent by the hook
    assert len(found) == (comm.rank == 0)
    cure = "train the model without it (ddp.module), or keep it with a plain optimizer and mpicomp.torch.ddp_hook"
    expected = f"{comm.here}: DistributedDataParallel also sends every gradient, uncompressed: {cure}"
    assert all(text == expected for text in found)


@pytest.mark.parametrize("kind", [OneBitAdam, ZeroOneAdam, OneBitLamb, DistributedLion])
def test_optimizers_that_exchange_momenta_warn_of_ddp_too(
    kind: Any, comm: Communicator, mpi_comm: MPI.Intracomm, folder: Path
) -> None:
    with process_group(mpi_comm, folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kind(nn.Linear(3, 1).named_parameters(), comm=comm)
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        kind(ddp.named_parameters(), comm=comm)
    texts = [str(one.message) for one in caught if one.category is UserWarning]
    assert ["DistributedDataParallel also sends every gradient" in text for text in texts] == [True] * (comm.rank == 0)


def test_ddp_within_the_only_node_is_no_reason_to_warn(mpi_comm: MPI.Intracomm, folder: Path) -> None:
    with process_group(mpi_comm, folder):
        ddp = DistributedDataParallel(nn.Linear(3, 1))
        for ranks_per_node in (2, 1):  # on two nodes it should have been of one rank
            with Communicator(mpi_comm, ranks_per_node=ranks_per_node) as comm:
                found = wrapped(ddp, comm, PerNode(DENSE))
                assert len(found) == (comm.rank == 0 and ranks_per_node == 1)
