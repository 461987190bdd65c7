"""What the tests of the training program share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from collectives import Communicator


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def comm(mpi_comm: MPI.Intracomm) -> Iterator[Communicator]:
    with Communicator(mpi_comm, topology="ring", timeout=20.0) as communicator:
        yield communicator


@pytest.fixture
def folder(mpi_comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One empty folder for all ranks."""
    return mpi_comm.bcast(tmp_path)
