"""Ends of processes: of a rank that an error ends, of one whose program ends while others wait, and of forked children.

A rank whose program ends notifies those that would wait for it.

A process that is forked from a rank is no rank and cannot communicate: MPI's threads and connections stay with the
parent. MPI_Finalize, which mpi4py calls when an interpreter ends, waits for ever in such a child. Children of
`multiprocessing` leave by `os._exit` and do not call it; others, made by `os.fork`, are made to leave in the same way.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from collectives import exit_without_mpi, tags
from collectives.exit_status import before_exit_at_once, exit_status, keep_exit_status, watch_exit_status
from collectives.exit_without_mpi import READING_S, die, fail_at_end, farewells, leave, leave_after_death, make_progress
from collectives.launcher import mark
from collectives.progress.polling import SLEEP_S
from collectives.recovery.fault_tolerance import (
    LONGEST_NOTICE_S,
    describe_failed,
    finalize_without_launcher,
    is_tolerant_job,
    look,
    revoke,
)
from collectives.recovery.launcher_end import watch_launcher
from collectives.recovery.mpich_memory import unlink_mpich_memory
from collectives.recovery.witness import end_by_itself

if TYPE_CHECKING:
    from collectives.group.ending import Ending
    from collectives.recovery.newcomers import Newcomers
    from collectives.recovery.regroup import Regroup

MEETING_TAG = tags.END_OF_PROGRAM.start
GRACE_S = 1.0  # in which ranks that end for the same reason print theirs
_has_abort_hook = False
_has_come = False  # to the meeting of all ranks at the end of their programs
_fails = False  # an error ends this rank, perhaps in a thread; it comes to no meeting any more
_choice = threading.Lock()  # between these two
_meets = False
_finalizes_with_all = False
_newcomers: Newcomers | None = None  # also once its communicator is closed and gone
_open: WeakSet[Ending] = WeakSet()


# Ranks that an error ends ---------------------------------------------------------------------------------------------


def expect_abort() -> None:
    """Leave the end of the job to the abort hook, where the program ends with a status other than 0."""
    global _has_abort_hook
    _has_abort_hook = True


def end_for_others() -> None:
    """Let the other ranks know that this one ends by an error; if they can go on without it, end here and now."""
    global _fails
    with _choice:
        _fails = not _has_come
    for farewell in tuple(farewells):
        farewell.keeps = True  # this thread uses communicators that another one may be closing
    # an error of a thread: others may be in MPI_Finalize, until they see a death
    if _has_come and not exit_without_mpi.is_leaving:
        time.sleep(GRACE_S)  # in which this rank's own end may come; MPI takes no calls while it is finalized
        die()
    if _newcomers is not None and _newcomers.is_spare and _newcomers.has_members:
        die()  # the others do without this rank, once MPI has reported its death to them
    # MPI_Abort of Open MPI 5.0.11 ends no other rank of a tolerant job and may leave the launcher hanging, which it did
    # in 14 of 14 jobs of 5 and 8 ranks. The others' calls fail instead, or they regroup.
    shared = [ending for ending in _open if ending.is_shared]
    regrouping = [ending for ending in shared if ending.recovers]
    if is_tolerant_job() and exit_without_mpi.expects_deaths and regrouping and _can_regroup():
        for ending in shared:
            ending.leave_by_error()
        deadline = time.monotonic() + GRACE_S
        # Where all ranks raise, none is left to end with a status but this one. Groups that do not regroup may have
        # ranks that died before, and these send nothing.
        while not all(ending.all_left for ending in regrouping):
            late_s = time.monotonic() - deadline
            if late_s > LONGEST_NOTICE_S or (late_s > 0 and all(ending.notices_received for ending in regrouping)):
                die()
            time.sleep(SLEEP_S)
    if any(ending.has_timed_out for ending in _open):  # perhaps since a link is cut
        watch_launcher(MPI.COMM_WORLD.size)
    if is_tolerant_job():
        # the launcher reports no rank to the others that leaves with a status other than 0
        for ending in shared:
            ending.dismiss()
            revoke(ending.mpi_comm)
        revoke(MPI.COMM_WORLD)  # ranks whose program has ended wait there
        make_progress(READING_S)  # in which they name the rank that died first


def _before_exit_at_once(status: int) -> None:
    """Let the other ranks know of an `os._exit`, after which MPI would wait for this rank for ever."""
    if status and is_tolerant_job() and MPI.COMM_WORLD.size > 1:
        end_for_others()
    end_by_itself()


# Ranks whose program ends, and forked children ------------------------------------------------------------------------


def end_with_process(ending: Ending) -> None:
    """Let a communicator leave at the end of the program, and reject calls in processes that are forked from this one.

    The registration does not keep the communicator alive.
    """
    _mark_rank()
    if is_tolerant_job():
        watch_exit_status()
        before_exit_at_once(_before_exit_at_once, GRACE_S + LONGEST_NOTICE_S + READING_S + 1.0)
    if not _open:
        # registered again by each first communicator, so that `leave` runs before MPI's own exit handler
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
    _open.add(ending)


def forget_endings(endings: Iterable[Ending]) -> None:
    """Forget communicators of a group that is no more: its ranks go on in another one, and leave that."""
    for ending in endings:
        _open.discard(ending)


def _leave_all() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        for ending in tuple(_open):
            with suppress(MPI.Exception):
                if not _aborts_next():
                    ending.dismiss()
                ending.leave()
        # `exit_without_mpi` runs this handler too: without the flag both would call each other again and again
        if not exit_without_mpi.is_leaving and is_tolerant_job() and (reason := _await_others() or _await_farewells()):
            leave_after_death(reason)
    if not _aborts_next():
        end_by_itself()


def say_farewell(regroup: Regroup) -> None:
    """Answer ranks that are still in close(), until all have left; MPI is not finalized before. See `Regroup`."""
    if not _fails and (farewell := regroup.say_farewell()):
        farewells.add(farewell)
        _leave_before_finalizing()


def _await_farewells() -> str:
    """Wait until all ranks have left communicators that are closed; returns why MPI cannot be finalized, or ""."""
    return "" if all(one.has_ended() for one in tuple(farewells)) else "not all ranks have left a communicator"


def meet_at_end(newcomers: Newcomers | None) -> None:
    """Let this rank wait for all others of the job at the end of its program: all ranks call this.

    `newcomers` has the ranks that wait for a death, if there are any.
    """
    global _meets, _newcomers
    _newcomers, _meets = newcomers or _newcomers, True
    finalize_without_launcher()
    _leave_before_finalizing()


def _leave_before_finalizing() -> None:
    """Let a program that calls `MPI.Finalize` itself leave its communicators before, as at its end."""
    global _finalizes_with_all
    if _finalizes_with_all:
        return
    _finalizes_with_all, finalize = True, MPI.Finalize

    def finalize_with_all() -> None:
        _leave_all()
        finalize()

    MPI.Finalize = finalize_with_all


def _aborts_next() -> bool:
    """Return True if the abort hook ends the job next: it runs after the handler of communicators."""
    return _has_abort_hook and exit_status() != 0


def _await_others() -> str:
    """Wait until the programs of all ranks end; returns the reason for which one of them never comes, or "".

    MPI_Finalize would wait for that rank for ever.
    """
    global _has_come
    world = MPI.COMM_WORLD
    meeting = _meet(world)
    died = 0.0
    left = [] if _aborts_next() else [ending for ending in _open if ending.is_left]
    deadline = time.monotonic() + GRACE_S
    try:
        while not any(ending.another_failed for ending in _open):
            if dead := describe_failed(world):
                # Ranks that all others have met before the death finalize MPI, which waits for this one too.
                died = died or time.monotonic()
                if not _has_come or time.monotonic() > died + GRACE_S:
                    return f"{dead} died"
            if time.monotonic() > deadline and not all(ending.all_left for ending in left):
                die()  # the others wait for this rank within a call, and go on once it is dead
            if not (_meets or left) or _aborts_next():
                return ""
            with _choice:
                _has_come = not _fails
            if _has_come and next(meeting, True):
                return ""
            if not dead:
                look(world)
            time.sleep(SLEEP_S)
    except MPI.Exception:  # a rank has died, or has given the job up
        if dead := describe_failed(world, READING_S):
            return f"{dead} died"
    fail_at_end()
    return "another rank has failed"


def _meet(comm: MPI.Comm) -> Iterator[bool]:
    """Yield False until all ranks have come. Open MPI's own barriers print errors of theirs after a death."""
    is_first, empty = comm.rank == 0, [np.empty(0, np.uint8), 0, MPI.BYTE]
    others = range(1, comm.size) if is_first else [0]
    pending = [comm.Irecv(empty, rank, MEETING_TAG) for rank in others]
    answer = [] if is_first else [comm.Isend(empty, 0, MEETING_TAG)]
    while pending := [request for request in pending if not request.Test()]:
        yield False
    pending = [comm.Isend(empty, rank, MEETING_TAG) for rank in others] if is_first else answer
    while pending := [request for request in pending if not request.Test()]:
        yield False


def _mark_rank() -> None:
    if MPI.Is_initialized() and not MPI.Is_finalized():
        unlink_mpich_memory()
        mark(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")


def _after_fork() -> None:
    for ending in tuple(_open):
        ending.forked()
    report = sys.excepthook

    def report_noting_status(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        keep_exit_status(1)
        report(kind, error, trace)

    watch_exit_status()
    sys.excepthook = report_noting_status
    # runs first, and so instead of all handlers that the parent registered
    atexit.register(lambda: leave(exit_status()))


def _can_regroup() -> bool:
    """Return True unless a communicator that regroups has failed on all ranks, which have given it up.

    Groups by `split` fail with the first death of their ranks, and the others go on without them.
    """
    return not any(ending.has_failed for ending in _open if ending.recovers)


os.register_at_fork(after_in_child=_after_fork)
_mark_rank()
