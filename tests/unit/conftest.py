"""The communicators of tests on one rank, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomp import Communicator

# Triton reads it when it is imported: PyTorch may do that in any test, long before those of the kernels for GPUs.
if not any(Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def comm() -> Iterator[Communicator]:
    """Give a communicator of one rank."""
    from mpi4py import MPI

    from mpicomp import Communicator

    with Communicator(MPI.COMM_SELF) as one:
        yield one


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    """Give a communicator whose packed vectors go through the executor, in pieces of 4096 elements."""
    from mpi4py import MPI

    from mpicomp import Communicator

    monkeypatch.setattr(Communicator, "gathers", lambda self, payload_bytes: False)
    with Communicator(MPI.COMM_SELF, piece_bytes=512) as one:
        yield one
