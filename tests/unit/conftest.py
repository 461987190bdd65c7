"""The communicators of tests on one rank, and the order of tests that several processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mpicomp import Communicator


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Start each process with a part of the files of long tests, one of which would keep a process at the end."""
    # before other hooks: on a busy machine one of them gives a limit to all tests
    limits = {item: float(mark.args[0]) for item in items if (mark := item.get_closest_marker("timeout"))}
    yield
    if n_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = in_shares(items, limits, n_processes)  # behind other hooks, one of which leaves tests out


def in_shares(items: list[pytest.Item], limits: Mapping[pytest.Item, float], n_processes: int) -> list[pytest.Item]:
    """Return tests in the order in which each process's share of them begins with files of tests that have limits."""
    files, rest = dict[Path, list[pytest.Item]](), list[pytest.Item]()
    for item in items:
        (files.setdefault(item.path, []) if item in limits else rest).append(item)
    longest_first = sorted(files.values(), key=lambda file: -max(limits[item] for item in file))
    share, ordered = len(items) // n_processes, list[pytest.Item]()
    for number in range(n_processes):
        ordered += (item for file in longest_first[number::n_processes] for item in file)
        taken = max((number + 1) * share - len(ordered), 0)
        ordered, rest = ordered + rest[:taken], rest[taken:]
    return ordered + rest


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
