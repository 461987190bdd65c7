"""The communicators of tests on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomp import Communicator


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
