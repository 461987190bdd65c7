"""A collective on the same buffers time and again: MPI's persistent one where the library has it (MPI 4)."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI


class Repeated:
    """What is started again and again.

    Parameters
    ----------
    persistent : callable
        Makes the persistent request.
    once : callable
        Starts the same collective as a non-blocking one, for libraries without persistent collectives.

    Attributes
    ----------
    request : MPI.Request
        Of the last start.
    """

    def __init__(self, persistent: Callable[[], MPI.Prequest], once: Callable[[], MPI.Request]) -> None:
        self._once = once
        self._persistent: MPI.Prequest | None = None
        try:
            self._persistent = persistent()
        except (NotImplementedError, MPI.Exception):
            self.request = MPI.REQUEST_NULL
        else:
            self.request = self._persistent

    def start(self) -> None:
        """Start it; the one before must be over."""
        if self._persistent is not None:
            self._persistent.Start()
        else:
            self.request = self._once()

    def free(self) -> None:
        """Give MPI's resources back."""
        if self._persistent is not None:
            self._persistent.Free()
