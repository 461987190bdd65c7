"""One rank's communicator, by either way the bits can go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI

from mpicomp import Communicator


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator(MPI.COMM_SELF) as one:
        yield one


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    """A communicator whose packed vectors go through the executor, in pieces of 4096 elements."""
    monkeypatch.setattr(Communicator, "gathers", lambda self, payload_bytes: False)
    with Communicator(MPI.COMM_SELF, piece_bytes=512) as one:
        yield one
