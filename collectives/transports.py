"""Transports: communicators of MPI, and objects with the same calls that take their place or wrap another.

They take buffers as mpi4py does: an array, or a list of an array, a count or counts per rank, and perhaps a type of
MPI.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes

BufferSpec: TypeAlias = Any


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


def array_of(buffer: BufferSpec) -> AnyArray:
    """Return the elements of a buffer's array as a vector."""
    array: AnyArray = buffer if isinstance(buffer, np.ndarray) else np.asarray(buffer[0])
    return array.reshape(-1)


def memory_of(buffer: BufferSpec) -> Bytes:
    """Return the bytes of a buffer, as many as it counts."""
    memory: Bytes = array_of(buffer).view(np.uint8)
    return memory[: nbytes_of(buffer)]


def nbytes_of(buffer: BufferSpec) -> int:
    """Return the length of a buffer in bytes, over all ranks."""
    return buffer.nbytes if isinstance(buffer, np.ndarray) else int(np.sum(buffer[1])) * itemsize_of(buffer)


def itemsize_of(buffer: BufferSpec) -> int:
    """Return the bytes of a counted element: of the type of MPI if a buffer has one, else of the array."""
    return int(buffer[2].Get_size() if len(buffer) > 2 else buffer[0].itemsize)
