"""Contracts of the objects that watch calls: the core calls them where there are some, and depends on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from mpi4py import MPI

from collectives.execution.payload import MessageStarter, Payload
from collectives.execution.program import Program

if TYPE_CHECKING:
    from collectives.execution.call import Call, Steps
    from collectives.execution.jobs import PieceWork


class Observer(Protocol):
    """Observer of the work and messages of a rank's calls, such as a trace."""

    def span(self, kind: str, name: str = "", **args: object) -> AbstractContextManager[None]:
        """Return a context manager around a block of the rank's own time."""
        ...

    def begin_wait(self, name: str) -> object:
        """Return a wait that begins now."""
        ...

    def end_wait(self, wait: Any) -> None:
        """End a wait now."""
        ...

    def around(self, kind: str, function: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `function` in a span."""
        ...

    def around_call(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call in the background."""
        ...

    def around_check(self, call: Call, steps: Steps, nbytes: int | None) -> Steps:
        """Return the steps of a check, which may sum a vector of so many bytes."""
        ...

    def around_work(self, kind: str, work: PieceWork, label_of: Callable[[Any], dict[str, int]]) -> PieceWork:
        """Return a function that does this work on a piece or a message with this label."""
        ...

    def around_run(
        self, call: Call, program: Program, payload: Payload, requests: MessageStarter
    ) -> tuple[Payload, MessageStarter]:
        """Return payload and requests of one run of a program."""
        ...

    def phases(self, **spans: tuple[float, float]) -> None:
        """Add spans that have ended, by kind, for a vector of one piece."""
        ...

    def drive_by_thread(self) -> None:
        """Note that a progress thread makes the calls from now on."""
        ...

    def of_ranks(self, ranks: Sequence[int]) -> Observer:
        """Return the observer of a group of some ranks, in its order."""
        ...

    def close(self, mpi_comm: MPI.Comm, timeout_s: float) -> None:
        """Make the exchanges that the end needs; collective."""
        ...

    def write(self) -> None:
        """End, and write the file."""
        ...

    def save(self) -> None:
        """End as `write`, without raising an error."""
        ...


class History(Protocol):
    """History of a group's calls, by which a rank explains a failure."""

    def begin(self, call: Call) -> None:
        """Note that a call begins."""
        ...

    def compare(self, call: Call) -> None:
        """Note that the ranks have compared a call."""
        ...

    def end(self, call: Call) -> None:
        """Note that a call has ended, by `call.error` if that is set."""
        ...

    def explain(self, error: BaseException, missing: Sequence[int] = ()) -> str:
        """Return the path of a folder with the calls of this rank, for an error; empty if nothing is written."""
        ...
