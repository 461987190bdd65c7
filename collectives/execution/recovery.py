"""Contract of the object that goes on with calls after ranks are lost, and repetition of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collectives.arrays.vectors import Flat
    from collectives.execution.call import Call, Steps

_Made = TypeVar("_Made")


class Recovery(Protocol):
    """Continuation of a group's calls and long-lived users: a `collectives.recovery.regroup.Regroup`.

    The core calls it where there is one.

    Attributes
    ----------
    members : tuple of int
        Rank that each rank had when the group was made.
    count : int
        How often the ranks have become others; equal on all.
    """

    members: tuple[int, ...]
    count: int

    def renewed(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call that begins now: other ones if the ranks have become others since it was made."""
        ...

    def around(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call that ends on all ranks or on none."""
        ...

    def recover(self, error: BaseException) -> bool:
        """Go on with the ranks that are left; returns False if no loss is the reason for the error."""
        ...

    def settled(self, call: Call) -> Steps:
        """Return steps that end once all ranks have done their part of a call; at most once for each call."""
        ...

    @property
    def has_pool(self) -> bool:
        """True if ranks of the job wait for the loss of others; perhaps this one does."""
        ...

    def dismiss(self) -> None:
        """End the ranks that wait for the loss of others."""
        ...

    def look(self) -> None:
        """Raise the error of MPI if a rank is lost, for steps that wait without messages."""
        ...

    def join(self, user: Any, view: Callable[[Any], Any] = ...) -> None:
        """Renew a long-lived user, by a view of it, whenever the ranks have become others."""
        ...

    @property
    def is_active_here(self) -> bool:
        """True while this thread goes on with the ranks that are left, and can make no call."""
        ...

    def complete(self, make: Callable[[], _Made]) -> _Made:
        """Return the result of a blocking call of MPI, in which all ranks take part that are left."""
        ...


def from_copy(source: Flat, target: Flat, steps: Callable[[], Steps]) -> Callable[[], Steps]:
    """Return `steps` for repetition: from a copy of the array if the result takes its memory."""
    if not source.overlaps(target):
        return steps
    values = source.values
    copy = values.copy() if isinstance(values, np.ndarray) else values.clone()

    def again() -> Steps:
        values[:] = copy
        return steps()

    return again
