"""Errors of one rank that every rank raises.

A missing folder or a full disk may concern one rank only. The other ranks would wait for that rank in their next
collective, so every phase that can fail on one rank ends with all ranks raising the same error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from mpi4py import MPI

from collectives import Communicator
from collectives.quoting import one_line

LAST_RANK_S = 10.0
"""Seconds that a failing job waits for its last rank."""
Result = TypeVar("Result")


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
        messages = comm.allgather_object(message)
        raise JobError(next((text for text in messages if text), "a rank failed, and has died since"))


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
    """Return True on all ranks if `flag` is true on at least one."""
    return float(np.asarray(comm.allreduce(np.array([float(flag)]), op="sum"))[0]) > 0


def gather_rows(comm: Communicator, values: np.ndarray) -> np.ndarray:
    """Return all ranks' float64 arrays of one shape, stacked in rank order.

    After a death there are as many rows as survivors, or also that of the dead rank; they are equal on all ranks.
    """
    return np.asarray(comm.allgather(np.ascontiguousarray(values)[np.newaxis]))


def on_rank_0(parse: Callable[[], Result]) -> Result:
    """Call a function that all ranks call in the same way, such as argparse's; rank 0 alone prints its output."""
    with ExitStack() as stack:
        if MPI.COMM_WORLD.rank != 0:
            for redirect in (redirect_stdout, redirect_stderr):
                stack.enter_context(redirect(StringIO()))
        return parse()


def fail(mpi_comm: MPI.Comm, message: str | None, status: int = 1) -> int:
    """Print an error that every rank has, on rank 0; no rank returns, and so ends the job, before that."""
    if mpi_comm.rank == 0 and message is not None:
        print(f"error: {message}", file=sys.stderr, flush=True)
    with suppress(MPI.Exception):  # a rank has died, for which nobody waits
        arrived = mpi_comm.Ibarrier()
        deadline = time.monotonic() + LAST_RANK_S
        while not arrived.Test() and time.monotonic() < deadline:
            time.sleep(0.01)
    return status
