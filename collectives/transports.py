"""Transports: communicators of MPI, and objects with the same calls that take their place or wrap another."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI


class Wrapper:
    """Base of transports that wrap another: calls that a subclass does not define are those of the wrapped one.

    Attributes
    ----------
    native : MPI.Comm
        The communicator that carries the messages in the end.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self.native, self.rank, self.size = comm, carrier(comm), comm.rank, comm.size

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_comm"], name)


def carrier(comm: Any) -> Any:
    """Return the communicator that carries the messages of a transport: of MPI, or of ranks that are threads."""
    return getattr(comm, "native", comm)


def has_processes(comm: Any) -> bool:
    """Return True if ranks are processes, whose messages MPI carries; False: they are threads."""
    return isinstance(carrier(comm), MPI.Comm)
