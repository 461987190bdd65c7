"""What commands that run on all ranks of a job share: rank 0 speaks and writes, and an error is every rank's."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.consistency.call_check import gather_texts
from collectives.progress.polling import wait

USAGE_ERROR = 2
FAREWELL_S = 10.0


def say(comm: Communicator, text: str) -> None:
    """Print on rank 0."""
    if comm.rank == 0:
        print(text, flush=True)


def open_file(comm: Communicator, option: str, path: str | None) -> tuple[TextIO | None, str]:
    """The file, on rank 0; or, on every rank, why it cannot be written; collective."""
    file, problem = None, ""
    if path is not None and comm.rank == 0:
        try:
            file = Path(path).open("w")  # noqa: SIM115 - the caller closes it
        except OSError as error:
            problem = f"{option} {path}: {error.strerror}; name a file that rank 0 can write"
    return file, gather_texts(comm.mpi_comm, problem, comm.timeout)[0]


def reject(mpi_comm: MPI.Comm, command: str, problem: str) -> int:
    """Tell an error that every rank has: rank 0 tells it, and no rank ends, taking the job along, before it has."""
    if mpi_comm.rank == 0:
        print(f"{command}: error: {problem}", file=sys.stderr, flush=True)
    with suppress(CollectiveError):
        wait(mpi_comm.Ibarrier(), FAREWELL_S, lambda: "the other ranks have ended")
    return USAGE_ERROR
