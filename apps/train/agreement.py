"""What lets a job of many ranks fail as one.

A missing folder or a full disk may meet one rank only. The others would wait for it in their next collective, so every
phase that can fail locally ends with all ranks knowing, and raising, the same error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from collectives import Communicator
from collectives.consistency.call_check import gather_texts


class JobError(Exception):
    """A failure that every rank of the job raises with the same one-line message: rank, cause and cure."""


@contextmanager
def together(comm: Communicator) -> Iterator[None]:
    """Run a block that may fail on some ranks with OSError or ValueError; if it does, all ranks raise JobError.

    The block holds no collective operation of its own. The message is that of the lowest rank that failed.
    """
    message = ""
    try:
        yield
    except (OSError, ValueError) as error:
        message = f"rank {comm.rank} of {comm.size}: {error}"
    if any_rank(comm, bool(message)):
        messages = gather_texts(comm.mpi_comm, message, comm.timeout)
        raise JobError(next(text for text in messages if text))


def any_rank(comm: Communicator, flag: bool) -> bool:
    """Whether `flag` is true on at least one rank; the same answer on all."""
    return float(np.asarray(comm.allreduce(np.array([float(flag)]), op="sum"))[0]) > 0


def gather(comm: Communicator, values: Sequence[float] | np.ndarray) -> np.ndarray:
    """All ranks' `values` as float64 rows, on every rank.

    One row a rank, summed with zeros: unlike MPI's own gather the sum keeps the communicator's deadline.
    """
    row = np.asarray(values, dtype=np.float64)
    table = np.zeros((comm.size, row.size))
    table[comm.rank] = row
    return np.asarray(comm.allreduce(table.reshape(-1), op="sum")).reshape(comm.size, row.size)
