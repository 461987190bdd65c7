"""Ends of processes: of the job after an error, of a rank that others wait for, and of forked children.

One rank's uncaught exception ends the whole job, instead of leaving the others waiting. A rank whose program ends
notifies those that would wait for it.

A process that is forked from a rank is no rank and cannot communicate: MPI's threads and connections stay with the
parent. MPI_Finalize, which mpi4py calls when an interpreter ends, waits for ever in such a child. Children of
`multiprocessing` leave by `os._exit` and do not call it; others, made by `os.fork`, are made to leave in the same way.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO
from weakref import WeakSet

import numpy as np
from mpi4py import MPI

from collectives import error_report, tags
from collectives import trace as traces
from collectives.error_report import shorten_traceback
from collectives.errors import CollectiveError
from collectives.exit_status import (
    before_exit_at_once,
    exit_at_once,
    exit_message,
    exit_status,
    keep_exit_status,
    status_code,
    watch_exit_status,
)
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
    from collectives.recovery.farewell import Farewell
    from collectives.recovery.newcomers import Newcomers
    from collectives.recovery.regroup import Regroup

READING_S = 0.2  # in which other ranks read the last messages of one that leaves without MPI_Finalize
MEETING_TAG = tags.END_OF_PROGRAM.start
GRACE_S = 1.0  # in which ranks that end for the same reason print theirs
STATUS_AFTER_DEATH = "MPICOMP_STATUS_AFTER_DEATH"  # of survivors that went on to the end of their program
_installed = False
_expects_deaths = False
_other_failed = False
_is_leaving = False
_has_come = False  # to the meeting of all ranks at the end of their programs
_fails = False  # an error ends this rank, perhaps in a thread; it comes to no meeting any more
_choice = threading.Lock()  # between these two
_meets = False
_finalizes_with_all = False
_farewells: WeakSet[Farewell] = WeakSet()
_newcomers: Newcomers | None = None  # also once its communicator is closed and gone


# Uncaught exceptions --------------------------------------------------------------------------------------------------


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
    previous, previous_thread, rank = error_report.other_hook(), threading.excepthook, os.getpid()

    def end_job(status: int = 1, reason: str = "") -> None:
        if os.getpid() == rank:  # a process that was forked from one ends alone
            _abort(status, reason)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with _print_at_once(error):
            previous(kind, error, shorten_traceback(error, trace))
        end_job()

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            trace = shorten_traceback(args.exc_value, args.exc_traceback)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, trace, args.thread))
        with _print_at_once(args.exc_value):
            previous_thread(args)
        if not isinstance(args.exc_value, SystemExit):
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
    _end_for_others()
    if is_tolerant_job():
        _leave(status or 1)
    end_by_itself()
    MPI.COMM_WORLD.Abort(status)


def _end_for_others() -> None:
    """Let the other ranks know that this one ends by an error; if they can go on without it, end here and now."""
    global _fails
    with _choice:
        _fails = not _has_come
    for farewell in tuple(_farewells):
        farewell.keeps = True  # this thread uses communicators that another one may be closing
    if _has_come and not _is_leaving:  # an error of a thread: others may be in MPI_Finalize, until they see a death
        time.sleep(GRACE_S)  # in which this rank's own end may come; MPI takes no calls while it is finalized
        _die()
    if _newcomers is not None and _newcomers.is_spare and _newcomers.has_members:
        _die()  # the others do without this rank, once MPI has reported its death to them
    # MPI_Abort of Open MPI 5.0.11 ends no other rank of a tolerant job and may leave the launcher hanging, which it did
    # in 14 of 14 jobs of 5 and 8 ranks. The others' calls fail instead, or they regroup.
    shared = [ending for ending in _open if ending.is_shared]
    regrouping = [ending for ending in shared if ending.recovers]
    if is_tolerant_job() and _expects_deaths and regrouping and _can_regroup():
        for ending in shared:
            ending.leave_by_error()
        deadline = time.monotonic() + GRACE_S
        # Where all ranks raise, none is left to end with a status but this one. Groups that do not regroup may have
        # ranks that died before, and these send nothing.
        while not all(ending.all_left for ending in regrouping):
            late_s = time.monotonic() - deadline
            if late_s > LONGEST_NOTICE_S or (late_s > 0 and all(ending.notices_received for ending in regrouping)):
                _die()
            time.sleep(SLEEP_S)
    if any(ending.has_timed_out for ending in _open):  # perhaps since a link is cut
        watch_launcher(MPI.COMM_WORLD.size)
    if is_tolerant_job():
        # the launcher reports no rank to the others that leaves with a status other than 0
        for ending in shared:
            ending.dismiss()
            revoke(ending.mpi_comm)
        revoke(MPI.COMM_WORLD)  # ranks whose program has ended wait there
        _make_progress(READING_S)  # in which they name the rank that died first


def _make_progress(seconds: float) -> None:
    """Make progress in MPI: a revocation or a message may wait for room in a peer's queue."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(MPI.Exception):
            MPI.COMM_SELF.Iprobe()
        time.sleep(SLEEP_S)


def _before_exit_at_once(status: int) -> None:
    """Let the other ranks know of an `os._exit`, after which MPI would wait for this rank for ever."""
    if status and is_tolerant_job() and MPI.COMM_WORLD.size > 1:
        _end_for_others()
    end_by_itself()


# Ranks whose program ends, and forked children ------------------------------------------------------------------------


_open: WeakSet[Ending] = WeakSet()


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
        # `_leave_without_finalizing` runs this handler too: without the flag both would call each other again and again
        if not _is_leaving and is_tolerant_job() and (reason := _await_others() or _await_farewells()):
            _leave_after_death(reason)
    if not _aborts_next():
        end_by_itself()


def say_farewell(regroup: Regroup) -> None:
    """Answer ranks that are still in close(), until all have left; MPI is not finalized before. See `Regroup`."""
    if not _fails and (farewell := regroup.say_farewell()):
        _farewells.add(farewell)
        _leave_before_finalizing()


def _await_farewells() -> str:
    """Wait until all ranks have left communicators that are closed; returns why MPI cannot be finalized, or ""."""
    return "" if all(one.has_ended() for one in tuple(_farewells)) else "not all ranks have left a communicator"


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
    return _installed and exit_status() != 0


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
                _die()  # the others wait for this rank within a call, and go on once it is dead
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


def expect_deaths() -> None:
    """Let the program's own status stand after a death, since the survivors go on."""
    global _expects_deaths
    _expects_deaths = True


def _leave_after_death(reason: str) -> None:
    """End this process without MPI_Finalize, and with a status other than 0 unless deaths are expected."""
    if not (_expects_deaths or exit_status()):
        here = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"
        print(f"{here}: {reason}, so that this program ends with status 1 in place of 0", file=sys.stderr)
        keep_exit_status(1)
    _leave_without_finalizing()


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
    global _is_leaving
    _is_leaving = True
    atexit.unregister(_leave_without_finalizing)
    atexit._run_exitfuncs()  # those that were registered before
    _make_progress(READING_S)
    uncaught = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    _leave(exit_status() or int(uncaught) or _status_after_death())


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
    atexit.register(lambda: _leave(exit_status()))


def _status_after_death() -> int:
    """Return the status of survivors whose program has come to its end: that of the environment, if it has one."""
    text = os.environ.get(STATUS_AFTER_DEATH, "")
    return int(text) if text.isdecimal() else int(_other_failed)


def _can_regroup() -> bool:
    """Return True unless a communicator that regroups has failed on all ranks, which have given it up.

    Groups by `split` fail with the first death of their ranks, and the others go on without them.
    """
    return not any(ending.has_failed for ending in _open if ending.recovers)


def _leave(status: int) -> NoReturn:
    deadline = time.monotonic() + LONGEST_NOTICE_S  # ranks in close() that regroup may wait for this one
    while any(one.is_alive() for one in tuple(_farewells)) and time.monotonic() < deadline:
        time.sleep(SLEEP_S)
    _flush_streams()
    end_by_itself()
    exit_at_once(status & 0xFF)


def _die() -> NoReturn:
    """End by a signal: the launcher reports that to the other ranks, and no exit status but 0."""
    _flush_streams()
    os.kill(os.getpid(), signal.SIGKILL)
    exit_at_once(1)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, RuntimeError, ValueError):  # closed, or interrupted by a signal while it was flushed
                stream.flush()


os.register_at_fork(after_in_child=_after_fork)
_mark_rank()
