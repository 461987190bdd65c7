"""Ranks whose program ends while others may wait for them: these are told, rather than left to wait."""

from __future__ import annotations

import atexit
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

from mpi4py import MPI


class Leaving(Protocol):
    """What the program has not closed."""

    def leave(self) -> None:
        """Tell the others that this rank comes to no more calls."""
        ...


_open: WeakSet[Leaving] = WeakSet()


def tell_at_exit(one: Leaving) -> None:
    """Have `leave` called when the program ends, if `one` is there still."""
    if not _open:
        atexit.unregister(_leave)
        atexit.register(_leave)
    _open.add(one)


def _leave() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for one in tuple(_open):
            with suppress(MPI.Exception):
                one.leave()
