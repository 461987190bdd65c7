"""Processes that are forked from a rank: they are no ranks, cannot communicate, and must leave without MPI.

MPI's threads and connections stay with the parent. MPI_Finalize, which mpi4py calls when an interpreter ends, waits for
ever in a child that has neither. A child of `multiprocessing` leaves by `os._exit` and never comes there; one that
`os.fork` has made and that ends as a program does is led there.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Protocol
from weakref import WeakSet

from mpi4py import MPI

from collectives.children import mark
from collectives.progress import exit_status


class Forkable(Protocol):
    """What must not be used in a child."""

    def forked(self) -> None:
        """Reject all calls from now on, in the child."""
        ...


_inherited: WeakSet[Forkable] = WeakSet()


def reject_in_children(one: Forkable) -> None:
    """Have `forked` called in each process that is forked from this one."""
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
    atexit.register(_leave)  # called before all that the parent registered, and instead of it


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(exit_status.noted() & 0xFF)


os.register_at_fork(after_in_child=_after_fork)
_mark_rank()
