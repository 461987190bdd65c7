"""The communicators of tests on one rank, and the order of tests that several processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomp import Communicator


@pytest.hookimpl(tryfirst=True)  # on a busy machine another one gives a limit to all of them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with limits of their own first: they take longest, and one process would end alone with one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture(scope="session", autouse=True)
def launcher_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give Open MPI's launcher a folder without the files that killed jobs have left on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path_factory.mktemp("launchers")))
        yield


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

    from collectives.group.routes import Routes
    from mpicomp import Communicator

    monkeypatch.setattr(Routes, "gathers", lambda self, payload_bytes: False)
    with Communicator(MPI.COMM_SELF, piece_bytes=512) as one:
        yield one
