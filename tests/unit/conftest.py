"""The communicators of tests on one rank, and the order of tests that several processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomp import Communicator


@pytest.hookimpl(tryfirst=True)  # on a busy machine another one gives a limit to all of them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests with limits of their own first: they take longest, and one process would end alone with one.

    Each process has an equal part of their files at the beginning of its share of the list.
    """
    n_processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if not n_processes:
        return
    files, rest = dict[Path, list[pytest.Item]](), list[pytest.Item]()
    for item in items:
        (rest if item.get_closest_marker("timeout") is None else files.setdefault(item.path, [])).append(item)
    longest_first = sorted(files.values(), key=lambda file: -max(map(_limit_of, file)))
    share, ordered = len(items) // n_processes, list[pytest.Item]()
    for number in range(n_processes):
        ordered += (item for file in longest_first[number::n_processes] for item in file)
        taken = max((number + 1) * share - len(ordered), 0)
        ordered, rest = ordered + rest[:taken], rest[taken:]
    items[:] = ordered + rest


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return 0.0 if marker is None else float(marker.args[0])


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
