"""A model that two wrappers would average."""

from __future__ import annotations

import warnings
from pathlib import Path

from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from mpicomp import Dense
from mpicomp.torch import DistributedOptimizer
from tests.mpi.lanes import two_ranks
from tests.mpi.torch.ddp.hooked_models import hooked, process_group, sgd

pytestmark = two_ranks


def wrapped(model: nn.Module, comm: Communicator) -> list[str]:
    """Wrap an optimizer of the model's parameters; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedOptimizer(sgd(model), Dense(), comm, model.named_parameters())
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
