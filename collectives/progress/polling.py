"""Waiting without blocking: poll, back off, and give up at the deadline with a reason.

No call into MPI here waits. Between two polls Python runs, so signal handlers run too, and a dead peer costs the
timeout instead of for ever. Whoever waits advances all other calls that this thread has begun.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from collectives.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerFailure
from collectives.testable import Testable

POLLS = 16  # of a request in a row, where no other call is to be advanced
SPINS = 16  # turns without progress before the core is offered to others
YIELD_S = 0.05  # how long it is only offered; after that the rank sleeps between polls
SLEEP_S = 0.0005
LONGEST_LOOK_S = 0.5  # between two looks; the rest of a longer time was spent elsewhere
WARN_S = 15.0  # then a stall is logged, and again whenever it has become twice as long
WARN_PART = 0.25  # and no later than after this part of the timeout
MISMATCH_S = 1.0  # a call that stalls for longer ends by the mismatch of another one of its thread

_log = logging.getLogger("collectives")
_increase_reference_count = ctypes.pythonapi.Py_IncRef
_increase_reference_count.argtypes, _increase_reference_count.restype = (ctypes.py_object,), None


def keep_alive(*objects: object) -> None:
    """Never free these objects, not even when the interpreter ends.

    A message that did not get through stays with MPI, which may move its data as late as in MPI_Finalize: after the
    last of Python's modules, with all that they held, is gone.
    """
    for one in objects:
        _increase_reference_count(one)


class Advancing(Protocol):
    """A call in flight.

    Attributes
    ----------
    is_pairwise : bool
        Only two ranks make the call, which has no place in the order of calls.
    """

    done: bool
    is_pairwise: bool

    @property
    def group(self) -> object:
        """The communicator."""
        ...

    def advance(self) -> bool:
        """Do one bit of it without waiting; False if there was nothing to do. Does not raise what the call raises."""
        ...


class Failed(Protocol):
    """A call in the background that has ended by an error.

    Attributes
    ----------
    seen, dropped, detached : bool
        Its caller knows that it has ended, or does not mean to.
    """

    error: BaseException | None
    seen: bool
    dropped: bool
    detached: bool


class _Thread:
    """State of one thread.

    Attributes
    ----------
    rest : callable or None
        See `rest_by`.
    in_flight : list
        Its calls that go on in the background, on any communicator; may be edited.
    mismatch : Failed or None
        The last of its calls in the background in which the ranks differed.
    """

    __slots__ = ("in_flight", "mismatch", "rest")

    def __init__(self) -> None:
        self.rest: Callable[[], None] | None = None
        self.in_flight: list[Advancing] = []
        self.mismatch: Failed | None = None


class _Threads(threading.local):
    def __init__(self) -> None:
        self.own = _Thread()


_threads = _Threads()


class Limits(NamedTuple):
    """How long to wait; a communicator has these attributes too.

    Attributes
    ----------
    timeout : float
        Seconds without progress after which to give up.
    given_up : callable, optional
        Asked between two sleeps: whether another rank has given up.
    trace : Trace, optional
        Where waits are recorded.
    """

    timeout: float
    given_up: Callable[[], bool] | None = None
    trace: Any = None


def calls_of_this_thread() -> list[Advancing]:
    """The calls that go on in the background and that the calling thread drives; may be edited."""
    return _threads.own.in_flight


def forget_mismatch() -> None:
    """Drop the mismatch of a call of the calling thread, which leaves a communicator by an exception."""
    _threads.own.mismatch = None


def rest_by(rest: Callable[[], None] | None) -> Callable[[], None] | None:
    """Let this thread wait by calling `rest`, which sleeps until something may have come; None: by polling.

    Returns
    -------
    callable or None
        The `rest` before.
    """
    before, _threads.own.rest = _threads.own.rest, rest
    return before


class Backoff:
    """Backs off while nothing moves.

    Parameters
    ----------
    group : Limits, or a communicator
        After whose timeouts `idle` raises.
    describe : callable
        Returns a sentence with the waiting rank and its cause, as in ``"rank 3 of 8, step 5: nothing from rank 2"``.
    clock : callable
        Clock of `waited_s`; the timeout is always of time on the wall.

    Attributes
    ----------
    describe : callable
        May be set while a call goes on.
    thread : object
        Of the thread that has made this: see `_Thread`.
    arrival : int or None
        Number of the call that other ranks may have yet to come to, for which they have the `arrival_timeout`; 0 where
        calls have no numbers; None: all ranks have come, and none is silent for longer than the `timeout`.
    polls : int
        How often a request is tested before the other calls have their turn.
    wait_name : str or None
        Name of this phase's waits in a trace; None: they are not recorded.
    idle_turns : int
        How often `idle` was called since something moved.
    since : float
        Start of the current stall, by the clock.
    waited_s : float
        Seconds in which nothing moved, so far.
    timeout : float or None
        Seconds after which `idle` raises; None: the group's.
    caller : object
        Of the thread that has made this, where another one drives it; else None.
    mismatch : str
        How the ranks are known to differ in this call, so that no rank can wait for more than the others' words.
    rest_meanwhile : callable or None
        Sleeps while other threads of this process work for this, and returns whether they do.
    """

    # in the class, so that a call that never waits does not pay for them
    wait_name: str | None = ""
    arrival: int | None = None
    timeout: float | None = None
    rest_meanwhile: Callable[[], bool] | None = None
    caller: _Thread | None = None
    mismatch = ""
    polls = 1
    since = waited_s = 0.0
    idle_turns, _asked = 0, False
    _looked = _stalled_s = _notice_s = 0.0
    _wait: Any = None

    def __init__(self, group: Any, describe: Callable[[], str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.group, self.describe, self._clock, self.thread = group, describe, clock, _threads.own

    def drive_here(self) -> None:
        """Have the thread that calls this drive it, where another one has made it."""
        self.caller, self.thread = self.thread, _threads.own

    def moved(self) -> None:
        """Something happened: start over."""
        if self.idle_turns:
            self.waited_s += self._clock() - self.since
            self.idle_turns, self._asked = 0, False
            if self._wait is not None:
                self.group.trace.end_wait(self._wait)
                self._wait = None

    def advance_all(self) -> bool:
        """Do one bit of every call in flight of the thread that made this one; whether any of them moved."""
        moved = False
        for call in tuple(self.thread.in_flight):
            moved |= call.advance()
        return moved

    def standstill_s(self, rest: bool) -> float:
        """For how long nothing has moved that this may have to wait for, in seconds; parameter as in `idle`."""
        return math.inf

    def excuse(self) -> None:
        """Something has ended that this may have had to wait for: its timeout starts over."""
        self._stalled_s = 0.0

    @property
    def stalled_s(self) -> float:
        """Seconds since something moved, as far as they count towards the timeout."""
        return self._stalled_s if self.idle_turns else 0.0

    def idle(self, rest: bool = True) -> None:
        """Nothing happened in this turn.

        Parameters
        ----------
        rest : bool
            Advance the other calls of this thread and offer the core to others; False: return at once.

        Raises
        ------
        CollectiveTimeout
            Nothing has happened for too long.
        """
        self.idle_turns += 1
        if self.idle_turns == 1:
            self.since, self._looked = self._clock(), time.perf_counter()
            self._stalled_s = self._notice_s = 0.0
            if self.group.trace is not None and rest and self.wait_name is not None:
                self._wait = self.group.trace.begin("wait", self.wait_name)
        sleepy = False
        thread = self.thread
        if rest and not (thread.in_flight and self.advance_all()):
            if self.rest_meanwhile is not None and self.rest_meanwhile():
                self._looked = time.perf_counter()  # it was this process that computed
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
        # only time spent looking counts: neither what the caller computes between looks, nor time of a suspended job
        self._stalled_s += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        stalled_s = self._stalled_s
        if stalled_s < YIELD_S:
            return
        if sleepy:
            time.sleep(SLEEP_S)
        group, given_up, limit_s = self.group, self.group.given_up, self.timeout
        if limit_s is None:
            limit_s = group.timeout if self.arrival is None else group.arrival_timeout
        if not self._notice_s:
            self._notice_s = min(WARN_S, WARN_PART * limit_s) + (group.missing.delay_s if self.arrival else 0.0)
        notice_s = self._notice_s
        if stalled_s > min(notice_s, limit_s):
            stalled_s = self._stalled_s = min(stalled_s, self.standstill_s(rest))
        if stalled_s > limit_s:
            raise self._error(f"{self.describe()} after {_rounded(stalled_s)} s")
        if given_up is not None and given_up():
            raise self._error(f"{self.describe()} after {_rounded(stalled_s)} s, and another rank has given up")
        if self.arrival and (gone := group.missing.gone(self.arrival)):
            raise self._error(f"{self.describe()}: {gone}")
        if stalled_s > MISMATCH_S and self._mismatch_elsewhere():
            raise self._error(f"{self.describe()} after {_rounded(stalled_s)} s")
        if stalled_s > notice_s:
            self._notice(stalled_s, limit_s)

    def mark_raised(self) -> None:
        """Note that an error was raised to the caller: no call raises an earlier mismatch of another one after it."""
        (self.caller or self.thread).mismatch = None

    def _mismatch_elsewhere(self) -> str:
        """Return how the ranks differ in a call in flight of this thread, of which the caller does not know yet."""
        call = (self.caller or self.thread).mismatch
        if call is None or call.seen or call.dropped or call.detached:
            return ""
        return str(call.error)

    def _error(self, text: str) -> CollectiveError:
        """Return a mismatch if one is known to be the cause, on whichever rank and communicator, else a timeout."""
        missing = getattr(self.group, "missing", None)
        cause = self.mismatch or (missing and missing.mismatch) or self._mismatch_elsewhere()
        if not cause:
            return CollectiveTimeout(text)
        return CollectiveMismatch(text if cause == self.mismatch else f"{text}: {cause}", closes=True)

    def _notice(self, stalled_s: float, limit_s: float) -> None:
        """Log a long stall; where ranks are yet to come, find out first which ones."""
        told = ""
        if self.arrival:
            missing = self.group.missing
            if not self._asked:
                self._asked = True
                self._notice_s = stalled_s + missing.ask(self.arrival)
                return
            self._asked, told = False, missing.awaited(self.arrival)
        self._notice_s = 2 * stalled_s
        if told is not None:
            _log.warning("%s for %s s%s; giving up after %g s", self.describe(), _rounded(stalled_s), told, limit_s)


def _rounded(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 999.5 else f"{seconds:.0f}"


def until(request: Testable, backoff: Backoff) -> Iterator[bool]:
    """Steps of a call that end when a request is over; `backoff` then starts over."""
    test, polls = request.Test, range(backoff.polls)
    while True:
        for _ in polls:
            if test():
                if backoff.idle_turns:
                    backoff.moved()
                return
        yield False


def done(backoff: Backoff, request: Testable | None) -> Iterator[bool]:
    """Steps of a call that end when a request is over; there are none where there is no request."""
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
        backoff = Backoff(Limits(timeout_s, given_up), describe)
        while not request.Test():
            backoff.idle()
    except BaseException as error:
        keep_alive(request)  # and with it its buffers
        if isinstance(error, MPI.Exception):
            raise PeerFailure(f"{describe()}: MPI says {error}") from error
        raise
