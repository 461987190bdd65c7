"""Errors of one rank that every rank raises.

A missing folder or a full disk may concern one rank only. The other ranks would wait for that rank in their next
collective, so every phase that can fail on one rank ends with all ranks raising the same error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from collectives import Communicator
from collectives.consistency.call_check import gather_texts
from collectives.json_file import one_line


class JobError(Exception):
    """A failure that every rank of the job raises with the same one-line message: rank, cause and cure."""


@contextmanager
def raise_on_all_ranks(comm: Communicator) -> Iterator[None]:
    """Run a block; if it fails on any rank, raise JobError on all; collective.

    Collectives in the block must fail on all ranks or on none.

    OSError, ValueError and MemoryError become JobErrors. The message is that of the lowest rank that failed.
    """
    message = ""
    try:
        yield
    except (OSError, ValueError, MemoryError) as error:
        message = f"rank {comm.rank} of {comm.size}: {one_line(error) or 'out of memory'}"
    if any_rank(comm, bool(message)):
        messages = gather_texts(comm.mpi_comm, message, comm.arrival_timeout)
        raise JobError(next(text for text in messages if text))


@contextmanager
def naming_cure(path: Path, other: str) -> Iterator[None]:
    """Add file, cause and cure to an error of the file system: to make room, or to name another file or folder."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"cannot write {error.filename or path} ({error.strerror}); make room there or name another {other}"
        ) from error


def any_rank(comm: Communicator, flag: bool) -> bool:
    """Whether `flag` is true on at least one rank; the same answer on all."""
    return float(np.asarray(comm.allreduce(np.array([float(flag)]), op="sum"))[0]) > 0
