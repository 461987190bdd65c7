"""Ends of a process without MPI_Finalize, which may wait for ever for a rank that has died."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakSet

from mpi4py import MPI

from collectives.exit_status import exit_at_once, exit_status, keep_exit_status, watch_exit_status
from collectives.progress.polling import SLEEP_S
from collectives.recovery.fault_tolerance import LONGEST_NOTICE_S
from collectives.recovery.witness import end_by_itself

if TYPE_CHECKING:
    from collectives.recovery.farewell import Farewell

READING_S = 0.2  # in which other ranks read the last messages of one that leaves without MPI_Finalize
STATUS_AFTER_DEATH = "MPICOMP_STATUS_AFTER_DEATH"  # of survivors that went on to the end of their program
farewells: WeakSet[Farewell] = WeakSet()  # of communicators that this rank has left, and others perhaps not
# Read both through the module: `from ... import` would keep their first values
expects_deaths = False
is_leaving = False
_other_failed = False


def expect_deaths() -> None:
    """Let the program's own status stand after a death, since the survivors go on."""
    global expects_deaths
    expects_deaths = True


def fail_at_end() -> None:
    """End the program with status 1 in place of 0: a rank has ended by an exception, and the others went on."""
    global _other_failed
    _other_failed = True


def leave_without_finalizing() -> None:
    """End this process without MPI_Finalize, which may wait for a rank that has died."""
    atexit.unregister(_leave_without_finalizing)
    watch_exit_status()
    atexit.register(_leave_without_finalizing)


def _leave_without_finalizing() -> None:
    """Run the other exit handlers, and end this process."""
    global is_leaving
    is_leaving = True
    atexit.unregister(_leave_without_finalizing)
    atexit._run_exitfuncs()  # those that were registered before
    make_progress(READING_S)
    uncaught = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    leave(exit_status() or int(uncaught) or status_after_death())


def leave_after_death(reason: str) -> None:
    """End this process without MPI_Finalize, and with a status other than 0 unless deaths are expected."""
    if not (expects_deaths or exit_status()):
        here = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
        print(f"{here}: {reason}, so that this program ends with status 1 in place of 0", file=sys.stderr)
        keep_exit_status(1)
    _leave_without_finalizing()


def status_after_death() -> int:
    """Return the status of survivors whose program has come to its end: that of the environment, if it has one."""
    text = os.environ.get(STATUS_AFTER_DEATH, "")
    return int(text) if text.isdecimal() else int(_other_failed)


def make_progress(seconds: float) -> None:
    """Make progress in MPI: a revocation or a message may wait for room in a peer's queue."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(MPI.Exception):
            MPI.COMM_SELF.Iprobe()
        time.sleep(SLEEP_S)


def leave(status: int) -> NoReturn:
    """End this process with a status."""
    deadline = time.monotonic() + LONGEST_NOTICE_S  # ranks in close() that regroup may wait for this one
    while any(one.is_alive() for one in tuple(farewells)) and time.monotonic() < deadline:
        time.sleep(SLEEP_S)
    _flush_streams()
    end_by_itself()
    exit_at_once(status & 0xFF)


def die() -> NoReturn:
    """End by a signal: the launcher reports that to the other ranks, and no exit status but 0."""
    _flush_streams()
    os.kill(os.getpid(), signal.SIGKILL)
    exit_at_once(1)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, RuntimeError, ValueError):  # closed, or interrupted by a signal while it was flushed
                stream.flush()
