"""One rank's uncaught exception ends the whole job, instead of leaving the others waiting."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from types import TracebackType

from mpi4py import MPI

from collectives import trace as traces


def install_abort_hook() -> None:
    """After an uncaught exception: print its traceback with the rank, write traces if there are any, then MPI_Abort.

    Call it once, early in the program. It wraps the hooks that are installed, for the main thread and others.
    KeyboardInterrupt aborts too, SystemExit never: a program that ends by ``sys.exit`` does so on all ranks. A program
    started with ``python -m mpi4py`` has a similar behaviour.
    """
    previous, previous_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # torch.distributed's hook, installed later, keeps what this one prints and would show it afterwards
        kept = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
        with contextlib.redirect_stderr(sys.__stderr__ if kept else sys.stderr):
            previous(kind, error, trace)
            _abort()

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        previous_thread(args)
        if args.exc_type is not SystemExit:
            _abort()

    sys.excepthook, threading.excepthook = hook, thread_hook


def _abort() -> None:
    if not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.size == 1:
        return
    sys.stdout.flush()
    traces.flush()
    print(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}: ending the job", file=sys.stderr, flush=True)
    MPI.COMM_WORLD.Abort(1)
