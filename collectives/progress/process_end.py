"""Ends of processes: ranks notify others that wait for them, and forked children leave without MPI.

A process that is forked from a rank is no rank and cannot communicate: MPI's threads and connections stay with the
parent. MPI_Finalize, which mpi4py calls when an interpreter ends, waits for ever in such a child. Children of
`multiprocessing` leave by `os._exit` and do not call it; others, made by `os.fork`, are made to leave in the same way.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from mpi4py import MPI

from collectives.children import mark
from collectives.progress import exit_status


class Leaving(Protocol):
    """Object that may be open when the program ends."""

    def leave(self) -> None:
        """Notify the other ranks that this one makes no more calls."""
        ...


class Forkable(Protocol):
    """Object that must not be used in a forked process."""

    def forked(self) -> None:
        """Reject all calls from now on, in the child."""
        ...


_open: WeakSet[Leaving] = WeakSet()
_inherited: WeakSet[Forkable] = WeakSet()


def leave_at_exit(one: Leaving) -> None:
    """Register an object whose `leave` is called at the end of the program, if the object still exists."""
    if not _open:
        # registered again by each first object, so that `leave` runs before MPI's own exit handler
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
    _open.add(one)


def _leave_all() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for one in tuple(_open):
            with suppress(MPI.Exception):
                one.leave()


def reject_in_children(one: Forkable) -> None:
    """Register an object whose `forked` is called in each process that is forked from this one."""
    _mark_rank()
    _inherited.add(one)


def _mark_rank() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        mark(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")


def _after_fork() -> None:
    for one in tuple(_inherited):
        one.forked()
    report = sys.excepthook

    def report_noting_status(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        exit_status.note(1)
        report(kind, error, trace)

    exit_status.watch()
    sys.excepthook = report_noting_status
    atexit.register(_leave_child)  # runs first, and so instead of all handlers that the parent registered


def _leave_child() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_status.noted() & 0xFF)


os.register_at_fork(after_in_child=_after_fork)
_mark_rank()
