"""What commands that run on all ranks of a job share: rank 0 speaks and writes, and an error is every rank's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TextIO, TypeVar

from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.consistency.call_check import gather_texts
from collectives.progress.polling import wait

USAGE_ERROR = 2
FAREWELL_S = 10.0
_Request = TypeVar("_Request")


class UsageError(Exception):
    """What is asked for cannot be done; raised on every rank."""


def conduct(
    command: str, start: Callable[[], tuple[_Request, Communicator]], run: Callable[[_Request, Communicator], int]
) -> int:
    """Run a command with what `start` returns; the exit status, the same on every rank."""
    try:
        request, comm = start()
    except UsageError as error:
        return _reject(MPI.COMM_WORLD, command, error)
    try:
        with comm:
            try:
                return run(request, comm)
            except UsageError as error:
                return _reject(comm.mpi_comm, command, error)
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)
        return 1


def require_none(mpi_comm: MPI.Comm, problem: str, timeout_s: float) -> None:
    """Raise UsageError on every rank with the first rank's problem, unless all ranks' texts are empty; collective."""
    told = next(filter(None, gather_texts(mpi_comm, problem, timeout_s)), "")
    if told:
        raise UsageError(told)


def open_file(comm: Communicator, option: str, path: str | None) -> AbstractContextManager[TextIO | None]:
    """The file, on rank 0, to be entered by ``with``; collective. UsageError if it cannot be written."""
    file: AbstractContextManager[TextIO | None] = nullcontext()
    problem = ""
    if path is not None and comm.rank == 0:
        try:
            file = Path(path).open("w")  # noqa: SIM115 - the caller closes it
        except OSError as error:
            problem = f"{option} {path}: {error.strerror}; name a file that rank 0 can write"
    require_none(comm.mpi_comm, problem, comm.timeout)
    return file


def write(comm: Communicator, option: str, file: TextIO | None, text: str) -> None:
    """Write a text to the file that `open_file` has opened on rank 0; collective. UsageError if it takes no more."""
    problem = ""
    if file is not None:
        try:
            file.write(text)
            file.flush()
        except OSError as error:
            problem = f"rank 0, {option} {file.name}: {error.strerror}; make room there, or name another file"
            with suppress(OSError):
                file.close()  # closing writes the rest, which fails again
    require_none(comm.mpi_comm, problem, comm.timeout)


def _reject(mpi_comm: MPI.Comm, command: str, error: UsageError) -> int:
    """Let rank 0 tell an error that every rank has; no rank ends, taking the job along, before it has."""
    if mpi_comm.rank == 0:
        print(f"{command}: error: {error}", file=sys.stderr, flush=True)
    with suppress(CollectiveError):
        wait(mpi_comm.Ibarrier(), FAREWELL_S, lambda: "the other ranks have ended")
    return USAGE_ERROR
