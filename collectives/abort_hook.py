"""Abort hook: one rank's uncaught exception ends the whole job, instead of leaving the others waiting."""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import TracebackType
from typing import TextIO

from mpi4py import MPI

from collectives import error_report
from collectives import trace as traces
from collectives.error_report import shorten_traceback
from collectives.errors import CollectiveError, CollectiveTimeout
from collectives.exit_status import exit_message, exit_status, status_code, watch_exit_status
from collectives.exit_without_mpi import leave
from collectives.process_end import GRACE_S, end_for_others, expect_abort
from collectives.recovery.fault_tolerance import is_tolerant_job
from collectives.recovery.witness import end_by_itself

_installed = False


def install_abort_hook() -> None:
    """After an uncaught exception: print its traceback with the rank, write traces if there are any, then MPI_Abort.

    A program that ends by `sys.exit`, `exit` or `quit` with a status other than 0 ends the job too, with this status.
    After a status of 0 it does not: ranks may end one after the other.

    The first `Communicator` over all ranks of a job calls it. Call it early in the program, so that it covers the lines
    before the communicator, too. It wraps the hooks that are installed, for the main thread and others; calling it
    again does nothing. KeyboardInterrupt aborts too. A program started with ``python -m mpi4py`` has a similar
    behaviour.

    Of an error whose message names cause and cure, such as CollectiveMismatch, the traceback shows the caller's lines
    only; of any other error, and with ``MPICOMP_TRACEBACK=full``, it shows all.

    Examples
    --------
    In a program, before the lines that may fail on one rank alone:

    >>> import subprocess, sys
    >>> program = '''
    ... import mpicomp
    ... mpicomp.install_abort_hook()
    ... settings = open("settings-of-this-node.json")
    ... '''
    >>> subprocess.run([sys.executable, "-c", program], capture_output=True).returncode
    1
    """
    global _installed
    if _installed:
        return
    _installed = True
    expect_abort()
    previous, previous_thread, rank = error_report.other_hook(), threading.excepthook, os.getpid()

    def end_job(status: int = 1, reason: str = "") -> None:
        if os.getpid() == rank:  # a process that was forked from one ends alone
            _abort(status, reason)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _print_at_once(error):
            previous(kind, error, shorten_traceback(error, trace))
        try:
            await_status(error)
        finally:
            end_job()

    def await_status(error: BaseException | None) -> None:
        if isinstance(error, CollectiveTimeout):  # perhaps of a rank that is about to end the job with its own status
            time.sleep(2 * GRACE_S)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            trace = shorten_traceback(args.exc_value, args.exc_traceback)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
        with _print_at_once(args.exc_value):
            previous_thread(args)
        if not isinstance(args.exc_value, SystemExit):
            await_status(args.exc_value)
            end_job()
        elif args.thread is None:  # in a callback of the progress thread; in another thread it ends that thread alone
            end_after_status(status_code(args.exc_value.code))

    def end_after_status(status: int) -> None:
        if status:
            end_job(status, f"the program ends with status {status}, ")

    watch_exit_status()
    atexit.register(lambda: end_after_status(exit_status()))
    sys.excepthook, threading.excepthook = hook, thread_hook


def install_unless_attended() -> None:
    """Install the hook, except in an interactive session, under pytest, or with ``MPICOMP_ABORT_HOOK=0``."""
    attended = hasattr(sys, "ps1") or sys.flags.interactive or "pytest" in sys.modules
    if not attended and os.environ.get("MPICOMP_ABORT_HOOK") != "0":
        install_abort_hook()


@contextmanager
def _print_at_once(error: BaseException | None) -> Iterator[None]:
    """Collect all output of an error to stderr and print it at once, so that lines of several ranks do not mix."""
    text, stream = io.StringIO(), _stderr()
    try:
        with redirect_stderr(text):
            yield
    finally:
        found = text.getvalue()
        if _reports() and not isinstance(error, SystemExit | None):
            last = "".join(traceback.format_exception_only(error)).strip()
            found = _report(found, last, isinstance(error, CollectiveError))
        print(found, end="", file=stream, flush=True)


def _stderr() -> TextIO:
    # torch.distributed's hook, installed later, captures the output of this one and would show it afterwards
    if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
        return sys.__stderr__
    return sys.stderr


def _reports() -> bool:
    return error_report.are_read() and MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1


def _report(text: str, last: str, follows: bool = False) -> str:
    return error_report.ErrorReport(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, text, last, follows).line()


def _abort(status: int, reason: str) -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        end_by_itself()
        return
    sys.stdout.flush()
    traces.flush()
    here = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
    line = f"{here}: {reason}ending the job"
    if not _reports():
        print(line, file=_stderr(), flush=True)
    elif reason:  # of an error there is a report
        text = exit_message()
        print(_report("", f"{here}: {text}" if text else line), end="", file=_stderr(), flush=True)
    if reason:  # after the line: another rank, which misses this one, may end the job meanwhile
        time.sleep(GRACE_S)
    end_for_others()
    if is_tolerant_job():
        leave(status or 1)
    end_by_itself()
    MPI.COMM_WORLD.Abort(status)
