"""The communicator, as far as its own operations need it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from collectives.annotations import AnyArray
from collectives.arrays.elements import Combine, add
from collectives.execution.handle import Call, CallGroup, Handle, Steps
from collectives.trace.traffic import Traffic


class Group(CallGroup, Protocol):
    """The communicator, as far as exchanges, messages, operands and splitting need it.

    `Communicator` has these methods from its parts; see `Calls` for most of them.
    """

    rank: int
    size: int

    def run(self, call: Call, steps: Steps) -> Any:
        """Make a call and wait for its result."""
        ...

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background."""
        ...

    def check(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: AnyArray | None = None,
        sums: AnyArray | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Raise on every rank unless all make this call; a small vector may be summed in the same messages."""
        ...

    def agree(self, mark: int, describe: Callable[[], str]) -> None:
        """Raise on every rank unless all make this call, which does nothing else."""
        ...

    def reject(self, error: Exception, call: str) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that made the call."""
        ...

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Record a call, if there is a trace."""
        ...
