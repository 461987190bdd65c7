"""Open MPI's algorithms, forced while a communicator is made."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpicomp.cli import main
from mpicomp.cli.cluster_report.open_mpi_algorithms import SETTINGS, AllreduceAlgorithm


def test_algorithm_and_segments_are_set_only_while_a_communicator_is_made() -> None:
    threads = MPI.Query_thread()
    algorithm = AllreduceAlgorithm()
    assert MPI.Query_thread() == threads

    def settings() -> list[int]:
        found = ctypes.c_int()
        values = []
        for handle in algorithm._handles.values():
            algorithm._call("MPI_T_cvar_read", handle, ctypes.byref(found))
            values.append(found.value)
        return values

    watched: Any = SimpleNamespace(Dup=lambda info: settings())
    assert algorithm.dup(watched, 5, 1 << 20) == [5, 1 << 20]
    assert settings() == [0, 0]


def test_the_command_lets_open_mpi_read_the_numbers_before_it_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    seen = []

    def make_parser(chosen: object) -> None:
        seen.append(SETTINGS.items() <= os.environ.items())
        raise SystemExit

    monkeypatch.setattr(main, "make_parser", make_parser)
    for arguments in (["bench", "--count", "1"], ["bench", "--report=a"]):
        with pytest.raises(SystemExit):
            main.main(arguments)
    assert seen == [False, True]
