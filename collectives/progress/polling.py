"""Waiting without blocking: poll, back off, and give up at the deadline with a reason.

No call of MPI blocks here. Between two polls Python runs, so that signal handlers run too, and a dead peer costs the
timeout and no more. A waiting call advances all other calls of its thread.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from collectives.annotations import Testable
from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, DamagedMessage, PeerFailure

if TYPE_CHECKING:
    from collectives.execution.call import Call
    from collectives.execution.observer import Observer

POLLS = 16  # tests of a request in a row if there is no other call to advance
SPINS = 16  # turns without progress before the core is offered to others
YIELD_S = 0.05  # time for which the core is only offered; after it the rank sleeps between polls
SLEEP_S = 0.0005
LONGEST_LOOK_S = 0.5  # most that a turn counts towards the timeout; a longer time was spent elsewhere
WARN_S = 15.0  # stall after which a warning is logged, and again whenever the stall has doubled
WARN_PART = 0.25  # part of the timeout after which the warning is logged at the latest
MISMATCH_S = 1.0  # stall after which a call ends by the mismatch of another call of its thread

_log = logging.getLogger("collectives")
_increase_reference_count = ctypes.pythonapi.Py_IncRef
_increase_reference_count.argtypes, _increase_reference_count.restype = (ctypes.py_object,), None


def keep_alive(*objects: object) -> None:
    """Never free these objects, not even when the interpreter ends."""
    # MPI keeps messages that did not get through, and may move their data as late as in MPI_Finalize, after all Python
    # modules and their objects are gone.
    for one in objects:
        _increase_reference_count(one)


class _Thread:
    """State of one thread."""

    __slots__ = ("given_up", "in_flight", "mismatch", "rest")

    def __init__(self) -> None:
        self.given_up: Callable[[], bool] | None = None  # see `giving_up_by`
        self.rest: Callable[[], None] | None = None  # see `rest_by`
        self.in_flight: list[Call] = []  # on any communicator
        self.mismatch: Call | None = None  # the last of the calls in the background in which the ranks differed


class _Threads(threading.local):
    def __init__(self) -> None:
        self.own = _Thread()


_threads = _Threads()


class Limits(NamedTuple):
    """Limits of a wait; a communicator has these attributes too."""

    timeout: float  # seconds without progress after which to give up
    given_up: Callable[[], bool] | None = None  # called between two sleeps; returns whether another rank has given up
    observer: Observer | None = None  # of the waits


def calls_of_this_thread() -> list[Call]:
    """Return the calls in flight that the calling thread drives; may be edited."""
    return _threads.own.in_flight


def forget_mismatch() -> None:
    """Forget the mismatch of a call of this thread, since an exception leaves a communicator."""
    _threads.own.mismatch = None


def rest_by(rest: Callable[[], None] | None) -> Callable[[], None] | None:
    """Set the function by which this thread sleeps until a message may have come, None: poll; return the one before."""
    before, _threads.own.rest = _threads.own.rest, rest
    return before


@contextmanager
def giving_up_by(given_up: Callable[[], bool]) -> Iterator[None]:
    """Let each `wait` of this thread in the block end once another rank has given up, here or in a block around it."""
    before = _threads.own.given_up
    _threads.own.given_up = given_up if before is None else lambda: given_up() or before()
    try:
        yield
    finally:
        _threads.own.given_up = before


# Set where communicators can regroup, to `collectives.recovery.answers.answer_others`.
answer_others: Callable[[object], bool] | None = None


class Backoff:
    """Waiting of one call: it backs off while nothing moves."""

    # Defaults are in the class, so that a call that never waits does not pay for them.
    # Name of the waits of this phase; None: they are not observed.
    wait_name: str | None = ""
    # Number of the call that other ranks may not have come to, for which they have the `arrival_timeout`; 0 if the call
    # has no number; None: all ranks have come, and the `timeout` holds.
    arrival: int | None = None
    timeout: float | None = None  # seconds after which `idle` raises; None: the group's
    answers = False  # waiting here, this rank regroups communicators that other ranks regroup
    # Sleeps while other threads of this process work for this call, and returns whether they do.
    rest_meanwhile: Callable[[], bool] | None = None
    caller: _Thread | None = None  # the thread that has made this, if another one drives it
    # Description of this rank's call once the ranks are known to differ; only the other descriptions can still come.
    mismatch = ""
    polls = 1  # tests of a request in a row before the other calls have their turn
    since = waited_s = 0.0  # start of the current stall, by the clock; total time in which nothing moved
    idle_turns, _question_sent = 0, False  # calls of `idle` since something moved
    _looked = _stalled_s = _notice_s = 0.0
    _wait: object = None

    def __init__(self, group: Any, describe: Callable[[], str], clock: Callable[[], float] = time.perf_counter) -> None:
        # `describe` returns this rank and the cause, such as "rank 3 of 8, step 5: nothing from rank 2", and may be
        # replaced on the way. The clock counts `waited_s`; timeouts are always of wall-clock time.
        self.group, self.describe, self._clock, self.thread = group, describe, clock, _threads.own

    def drive_here(self) -> None:
        """Make the calling thread the one that drives this, after another thread has made it."""
        self.caller, self.thread = self.thread, _threads.own

    def moved(self) -> None:
        """End the current stall."""
        if self.idle_turns:
            self.waited_s += self._clock() - self.since
            self.idle_turns, self._question_sent = 0, False
            if self._wait is not None:
                self.group.observer.end_wait(self._wait)
                self._wait = None

    def advance_all(self) -> bool:
        """Advance every call in flight of the thread; return whether any of them moved."""
        moved = False
        for call in tuple(self.thread.in_flight):
            moved |= call.advance()
        return moved

    def standstill_s(self, rest: bool) -> float:
        """Return the shortest stall in seconds of anything that this may have to wait for; parameter as in `idle`."""
        return math.inf

    def excuse(self) -> None:
        """Start the timeout over, since something has ended that this may have waited for."""
        self._stalled_s = 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds since something moved that count towards the timeout."""
        return self._stalled_s if self.idle_turns else 0.0

    def idle(self, rest: bool = True) -> None:
        """Count a turn in which nothing moved; rest, warn, or raise CollectiveTimeout after the timeout."""
        self.idle_turns += 1
        if self.idle_turns == 1:
            self.since, self._looked = self._clock(), time.perf_counter()
            self._stalled_s = self._notice_s = 0.0
            if self.group.observer is not None and rest and self.wait_name is not None:
                self._wait = self.group.observer.begin_wait(self.wait_name)
        sleepy = False
        thread = self.thread
        # advance the other calls of this thread and offer the core to others
        if rest and not (thread.in_flight and self.advance_all()):
            if self.rest_meanwhile is not None and self.rest_meanwhile():
                self._looked = time.perf_counter()  # this process computed, which does not count towards the timeout
                return
            if thread.rest is not None:
                thread.rest()
            elif self.idle_turns < SPINS:
                return
            else:
                os.sched_yield()
                if self.idle_turns % 16:
                    return
                sleepy = True
        now = time.perf_counter()
        # Time that the caller computes between turns must not count, nor the time of a suspended job.
        self._stalled_s += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        stalled_s = self._stalled_s
        if stalled_s < YIELD_S:
            return
        if sleepy:
            time.sleep(SLEEP_S)
        if answer_others is not None and self.answers and answer_others(self.group):
            return  # the call may begin again, with another timeout
        self._check_limits(stalled_s, rest)

    def _check_limits(self, stalled_s: float, rest: bool) -> None:
        """Warn, or raise CollectiveTimeout, after a stall; raise if another rank has given up, or has left."""
        group, limit_s = self.group, self.timeout
        if limit_s is None:
            limit_s = group.timeout if self.arrival is None else group.arrival_timeout
        if not self._notice_s:
            self._notice_s = min(WARN_S, WARN_PART * limit_s) + (group.missing.delay_s if self.arrival else 0.0)
        notice_s = self._notice_s
        if stalled_s > min(notice_s, limit_s):
            stalled_s = self._stalled_s = min(stalled_s, self.standstill_s(rest))
        if stalled_s > limit_s:
            raise self._error(f"{self.describe()} after {_format_s(stalled_s)} s")
        if group.given_up is not None and group.given_up():
            cause = getattr(getattr(self.group, "missing", None), "error_elsewhere", "")
            raise self._error(f"{self.describe()} after {_format_s(stalled_s)} s, and another rank has given up{cause}")
        if self.arrival and (gone := group.missing.describe_gone(self.arrival)):
            raise self._error(f"{self.describe()}: {gone}")
        if stalled_s > MISMATCH_S and self._mismatch_elsewhere():
            raise self._error(f"{self.describe()} after {_format_s(stalled_s)} s")
        if stalled_s > notice_s:
            self._notice(stalled_s, limit_s)

    def mark_raised(self) -> None:
        """Record that an error was raised to the caller; later calls raise no earlier mismatch of another call."""
        (self.caller or self.thread).mismatch = None

    def _mismatch_elsewhere(self) -> str:
        """Return the text of a mismatch in another call of this thread that the caller has not seen, else empty."""
        call = (self.caller or self.thread).mismatch
        if call is None or call.seen or call.dropped or call.detached:
            return ""
        return str(call.error)

    def _error(self, text: str) -> CollectiveError:
        """Return the error that is known to be the cause, on any rank and communicator, else a timeout."""
        missing = getattr(self.group, "missing", None)
        if missing is not None and missing.damage:
            return DamagedMessage(missing.damage)
        theirs = missing.mismatch if missing is not None else ""
        if self.mismatch:  # another rank may have all descriptions, and so the whole text
            return CollectiveMismatch(theirs or text, closes=True)
        cause = theirs or self._mismatch_elsewhere()
        return CollectiveMismatch(f"{text}: {cause}", closes=True) if cause else CollectiveTimeout(text)

    def _notice(self, stalled_s: float, limit_s: float) -> None:
        """Log a long stall; if ranks have not come, find out first which ones."""
        late: str | None = ""
        if self.arrival:
            missing = self.group.missing
            if not self._question_sent:
                self._question_sent = True
                self._notice_s = stalled_s + missing.send_question(self.arrival)
                return
            self._question_sent, late = False, missing.describe_late(self.arrival)
        self._notice_s = 2 * stalled_s
        if late is not None:
            _log.warning("%s for %s s%s; giving up after %g s", self.describe(), _format_s(stalled_s), late, limit_s)


def _format_s(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 999.5 else f"{seconds:.0f}"


def until(request: Testable, backoff: Backoff) -> Iterator[bool]:
    """Yield until a request is over, as steps of a call; ends the stall of `backoff`."""
    test, polls = request.Test, range(backoff.polls)
    while True:
        for _ in polls:
            if test():
                if backoff.idle_turns:
                    backoff.moved()
                return
        yield False


def drive(steps: Iterator[bool], backoff: Backoff) -> None:
    """Run steps to their end without a call.

    Parameters
    ----------
    steps : iterator of bool
        Each resumption returns whether anything moved.
    backoff : Backoff
        Waits while nothing does.

    Raises
    ------
    CollectiveTimeout

    Examples
    --------
    >>> from collectives.progress.polling import Backoff, Limits, drive
    >>> drive(iter([True, False]), Backoff(Limits(timeout=1.0), lambda: "nothing to do"))
    """
    for moved in steps:
        if moved:
            backoff.moved()
        else:
            backoff.idle()


def done(backoff: Backoff, request: Testable | None) -> Iterator[bool]:
    """Return steps of a call that end when a request is over.

    Parameters
    ----------
    backoff : Backoff
        The call.
    request : Testable, optional
        None: there are no steps.

    Returns
    -------
    iterator of bool
        For ``yield from`` in the steps of a call.

    Examples
    --------
    >>> from collectives.progress.polling import done
    >>> list(done(None, None))
    []
    """
    return iter(()) if request is None else until(request, backoff)


def wait(
    request: Testable, timeout_s: float, describe: Callable[[], str], given_up: Callable[[], bool] | None = None
) -> None:
    """Poll one request until it is done. The parameters are those of `Limits` and `Backoff`.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    try:
        backoff = Backoff(Limits(timeout_s, given_up or _threads.own.given_up), describe)
        while not request.Test():
            backoff.idle()
    except BaseException as error:
        keep_alive(request)  # it owns buffers that MPI may still write to
        if isinstance(error, MPI.Exception):
            raise PeerFailure(f"{describe()}: MPI says {error}") from error
        raise
