"""Copies to the host's memory that something is to be done with once they are there."""

from __future__ import annotations

import time
from collections.abc import Callable

from collectives.testable import Testable

PATIENCE_S = 600.0


class Landed:
    """A copy to the host's memory, and what is to be done once it is there; see `Testable`.

    Parameters
    ----------
    copy : Testable or None
        None: it is there already.
    then : callable
        Called once, even if it raises or more tests follow.
    """

    __slots__ = ("_copy", "_then")

    def __init__(self, copy: Testable | None, then: Callable[[], object]) -> None:
        self._copy = copy
        self._then: Callable[[], object] | None = then

    def Test(self) -> bool:  # noqa: N802 - MPI's name
        """See `Testable`."""
        if self._then is None:
            return True
        if self._copy is not None and not self._copy.Test():
            return False
        then, self._then = self._then, None
        then()
        return True


def after_copy(copy: Testable | None, then: Callable[[], object]) -> Testable | None:
    """Call `then` once a copy is there: at once, and return None, where the device has made it already."""
    if copy is not None:
        return Landed(copy, then)
    then()
    return None


def wait(copy: Testable | None) -> None:
    """Wait for a copy outside of calls, as for a state; None is a copy that is there already.

    Raises
    ------
    RuntimeError
        The device does not come to it.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not (copy is None or copy.Test()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the device has not come to a copy in {PATIENCE_S:g} s")
        time.sleep(0)
