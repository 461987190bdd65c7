"""Frame of the commands that run on all ranks of a job: rank 0 prints and writes, and errors reach every rank."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TextIO, TypeVar

from mpi4py import MPI

from collectives import CollectiveError, Communicator
from collectives.consistency.descriptions import gather_texts
from collectives.progress.polling import wait

if TYPE_CHECKING:
    from rich.progress import Progress


USAGE_ERROR = 2
FAREWELL_S = 10.0
LEAST_STEPS = 2  # whose mean duration the remaining ones are expected to have
_Request = TypeVar("_Request")


class UsageError(Exception):
    """The arguments cannot be used. Raised on every rank."""


def conduct(
    command: str, start: Callable[[], tuple[_Request, Communicator]], run: Callable[[_Request, Communicator], int]
) -> int:
    """Run a command on the results of `start`; return the exit status, the same on every rank."""
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
    first = next(filter(None, gather_texts(mpi_comm, problem, timeout_s)), "")
    if first:
        raise UsageError(first)


def open_file(comm: Communicator, option: str, path: str | None) -> AbstractContextManager[TextIO | None]:
    """Open a file on rank 0, for ``with``; collective. Raises UsageError if it cannot be written."""
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
    """Write a text to the file of `open_file` on rank 0; collective. Raises UsageError if the disk is full."""
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
    """Print an error on rank 0. The other ranks wait for that, since a rank that ends early ends the job."""
    if mpi_comm.rank == 0:
        print(f"{command}: error: {error}", file=sys.stderr, flush=True)
    with suppress(CollectiveError):
        wait(mpi_comm.Ibarrier(), FAREWELL_S, lambda: "the other ranks have ended")
    return USAGE_ERROR


def on_terminal() -> bool:
    """Return whether the output of this process is shown on a terminal."""
    if not sys.stdout.isatty():
        return False
    # Open MPI gives its ranks a pseudo-terminal even if its own output goes to a file, so the output of the parent, the
    # launcher, must be a terminal too.
    try:
        launcher_output = Path(f"/proc/{os.getppid()}/fd/1").readlink()
    except OSError:
        return True
    return str(launcher_output).startswith("/dev/")


class Steps:
    """Display of the step under way: a bar on a terminal if rich is installed, else lines on stderr."""

    def __init__(self, command: str, n_steps: int, active: bool) -> None:
        # ranks that are not active display nothing
        self._command, self._n_steps, self._active = command, n_steps, active
        self._done, self._start = 0, time.perf_counter()
        # drawn only when a step begins: a drawing thread would take processor time from the measurements
        self._bar = _bar() if active and on_terminal() else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._n_steps)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def announce(self, duration: str) -> None:
        """Display how long all steps will take."""
        if self._active:
            print(f"{self._command}: {duration}", file=sys.stderr, flush=True)

    def print(self, text: str) -> None:
        """Print results of a step to stdout, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif self._active:
            print(text, flush=True)

    def begin(self, work: str) -> None:
        """Display the next step, which does this work."""
        if self._bar is not None:
            self._bar.update(self._task, description=work, completed=self._done)
            self._bar.refresh()
        elif self._active:
            elapsed_s = time.perf_counter() - self._start
            left_s = (self._n_steps - self._done) * elapsed_s / self._done if self._done >= LEAST_STEPS else None
            left = "" if left_s is None else f", about {left_s:.0f} s to go"
            line = f"{self._command}: step {self._done + 1} of {self._n_steps}, after {elapsed_s:.0f} s{left}: {work}"
            print(line, file=sys.stderr, flush=True)
        self._done += 1


def _bar() -> Progress | None:
    """Return a bar that is erased when it ends; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        return None
    times = TimeElapsedColumn(), TimeRemainingColumn(elapsed_when_finished=False)
    columns = BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.description}")
    console = Console(force_terminal=True, soft_wrap=True)
    return Progress(*columns, console=console, transient=True, auto_refresh=False)
