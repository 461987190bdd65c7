"""Multi-rank tests on numbers of ranks that have no lane: their functions, called by ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from _pytest.mark.structures import ParameterSet

from collectives import Communicator
from collectives.threads.run_local import run_local
from collectives.threads.thread_comm import LocalComm
from tests.mpi.lanes import TIMEOUT_S, delay_messages

# A lone rank, and numbers that the lanes of 2, 3 and 8 ranks hide: no power of two, or another one.
COUNTS = (1, 4, 5, 7)


class Case(NamedTuple):
    """Function of a multi-rank test, with the communicator and the values of one of its cases."""

    name: str
    function: Callable[..., None]
    topology: Any
    options: dict[str, Any]
    arguments: dict[str, Any]
    least_ranks: int

    def run(self, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Call the function on all ranks, which share one `monkeypatch`."""

        def work(comm: Communicator) -> None:
            given = {"comm": comm, "mpi_comm": comm.mpi_comm, "monkeypatch": monkeypatch} | self.arguments
            given["jitter"] = partial(delay_messages, monkeypatch)
            self.function(**{name: given[name] for name in _parameters(self.function)})

        exchange_objects(ranks, monkeypatch)
        run_local(ranks, work, self.topology, **self.options)


def cases(*modules: ModuleType) -> Iterator[Case]:
    """Yield the cases of all tests that are marked with `every_size`."""
    for module in modules:
        of_module = getattr(module, "pytestmark", [])
        of_module = of_module if isinstance(of_module, list) else [of_module]
        for name, function in vars(module).items():
            marks = [*getattr(function, "pytestmark", []), *of_module]
            if name.startswith("test_") and any(mark.name == "every_size" for mark in marks):
                yield from _cases(f"{module.__name__.rpartition('.')[2]}-{name}", function, marks)


def exchange_objects(ranks: int, patch: pytest.MonkeyPatch) -> None:
    """Give the communicator of all ranks the call of mpi4py's by which tests compare them."""
    board, meeting = [None] * ranks, threading.Barrier(ranks)

    def allgather(self: LocalComm, value: Any) -> list[Any]:
        assert self.size == ranks
        board[self.rank] = value
        meeting.wait(TIMEOUT_S)
        found = [*board]
        meeting.wait(TIMEOUT_S)
        return found

    patch.setattr(LocalComm, "allgather", allgather, raising=False)


def _cases(name: str, function: Callable[..., None], marks: Sequence[Any]) -> Iterator[Case]:
    """Yield a case for each combination of the test's parameters; those that the function lacks are options."""
    options: dict[str, Any] = {"topology": "ring", "timeout": TIMEOUT_S}
    for mark in reversed(marks):  # the closest comes first
        options |= mark.kwargs if mark.name == "communicator" else {}
    least = max((mark.kwargs.get("min_size", 1) for mark in marks if mark.name == "mpi"), default=1)
    parametrized = [_rows(*mark.args) for mark in marks if mark.name == "parametrize"]
    for number, combination in enumerate(product(*parametrized)):
        values = {key: value for row in combination for key, value in row.items()}
        made = options | {key: value for key, value in values.items() if key not in _parameters(function)}
        topology = values.pop("comm", made.pop("topology"))
        yield Case(f"{name}-{number}-{topology}", function, topology, made, values, least)


def _rows(names: str | Sequence[str], rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the values of one parametrization, without those for a certain number of ranks alone."""
    keys = names.split(", ") if isinstance(names, str) else names
    sets = [ParameterSet.extract_from(row, force_tuple=len(keys) == 1) for row in rows]
    return [
        dict(zip(keys, one.values, strict=True)) for one in sets if not any(mark.name == "mpi" for mark in one.marks)
    ]


def _parameters(function: Callable[..., None]) -> tuple[str, ...]:
    code = function.__code__
    return code.co_varnames[: code.co_argcount]
