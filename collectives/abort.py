"""One rank's uncaught exception ends the whole job, instead of leaving the others waiting."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from mpi4py import MPI

from collectives import trace as traces
from collectives.errors import explains_itself
from collectives.progress import exit_status

GRACE_S = 1.0  # in which ranks that end for the same reason print theirs
OURS = ("collectives", "mpicomp")
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
    """
    global _installed
    if _installed:
        return
    _installed = True
    previous, previous_thread, rank = sys.excepthook, threading.excepthook, os.getpid()

    def end_job(status: int = 1, reason: str = "") -> None:
        if os.getpid() == rank:  # a process that was forked from one ends alone
            _abort(status, reason)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _at_once():
            previous(kind, error, _shortened(error, trace))
        end_job()

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            trace = _shortened(args.exc_value, args.exc_traceback)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
        with _at_once():
            previous_thread(args)
        if not isinstance(args.exc_value, SystemExit):
            end_job()
        elif args.thread is None:  # in a callback of the progress thread; in another thread it ends that thread alone
            end_after_status(exit_status.code_of(args.exc_value.code))

    def end_after_status(status: int) -> None:
        if status and os.getpid() == rank:
            time.sleep(GRACE_S)
            end_job(status, f"the program ends with status {status}, ")

    exit_status.watch()
    atexit.register(lambda: end_after_status(exit_status.noted()))
    sys.excepthook, threading.excepthook = hook, thread_hook


def install_unless_attended() -> None:
    """Install the hook, except in an interactive session, under pytest, or with ``MPICOMP_ABORT_HOOK=0``."""
    attended = hasattr(sys, "ps1") or sys.flags.interactive or "pytest" in sys.modules
    if not attended and os.environ.get("MPICOMP_ABORT_HOOK") != "0":
        install_abort_hook()


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Collect all output to stderr and print it at once, so that lines of several ranks do not mix."""
    # torch.distributed's hook, installed later, captures the output of this one and would show it afterwards
    kept = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
    stream = sys.__stderr__ if kept else sys.stderr
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    finally:
        print(text.getvalue(), end="", file=stream, flush=True)


def _shortened(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback to print, and set it on the error: the caller's lines alone if the error explains itself."""
    if not explains_itself(error) or os.environ.get("MPICOMP_TRACEBACK") == "full":
        return trace
    lines = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in OURS:
            lines.append(trace)
        trace = trace.tb_next
    kept = None
    for line in reversed(lines):
        kept = TracebackType(kept, line.tb_frame, line.tb_lasti, line.tb_lineno)
    error.__traceback__, error.__suppress_context__, error.__cause__ = kept, True, None
    return kept


def _abort(status: int, reason: str) -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    sys.stdout.flush()
    traces.flush()
    with _at_once():
        print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: {reason}ending the job", file=sys.stderr)
    MPI.COMM_WORLD.Abort(status)
