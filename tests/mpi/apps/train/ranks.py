"""Jobs of fewer ranks than the lane has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

from collectives import Communicator


@contextmanager
def first_ranks(comm: Communicator, ranks: int) -> Iterator[Communicator | None]:
    """A communicator of the first ranks, None on the others; collective at its end, too."""
    part = comm.mpi_comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
    if part == MPI.COMM_NULL:
        yield None
    else:
        with Communicator(part, topology="ring", timeout=comm.timeout) as made:
            yield made
        part.Free()
    comm.mpi_comm.Barrier()
