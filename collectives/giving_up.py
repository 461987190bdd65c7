"""How ranks give a communicator up: after a call that failed on one of them none can know what is still to come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import NoReturn

from mpi4py import MPI

from collectives.consistency.missing_ranks import MissingRanks, named
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NonFiniteGradient,
    PeerFailure,
)
from collectives.execution.handle import Call
from collectives.execution.workers import Workers
from collectives.progress.polling import keep_alive
from collectives.progress.thread import ProgressThread
from collectives.trace.recorder import Trace

GRACE_S = 0.5  # time for all ranks to save traces before one ends the job


class GivingUp:
    """The calls in flight of a communicator, and what ends them all; `Group` sets what is only declared here.

    Attributes
    ----------
    failure : BaseException or None
        What the communicator was given up for.
    """

    size: int
    here: str
    missing: MissingRanks
    trace: Trace | None
    workers: Workers | None

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._broken = ""  # why there are no more calls
        self._in_flight: list[Call] = []
        self._apart: list[Call] = []  # in flight too, and outside the order of calls
        self._dropped: Call | None = None
        self._raised = False  # whether the failure was raised to the caller
        self._unheard: Call | None = None  # whose mismatch its caller may not have heard of
        self._driver: ProgressThread | None = None

    def fail(self, call: Call, error: BaseException) -> BaseException:
        """Take note that a call has failed; returns the error to raise."""
        if self.failure is not None:
            keep_alive(call)
            return error  # the communicator was given up before, and the ranks were asked then
        if isinstance(error, NonFiniteGradient):  # on all ranks
            call.owners = ()  # nothing of the call is in flight
            return error
        if isinstance(error, CollectiveMismatch) and call.is_pairwise:
            return error
        if isinstance(error, CollectiveMismatch):
            if call.background:
                (call.caller or call.thread).mismatch = call
            self._unheard = call if call.background and self._in_flight == [call] else None  # else others tell of it
            # a call that was begun while the ranks told each other what they called may wait for ranks that do not
            # make it
            if not error.closes and self.tolerates_mismatch(call):
                return error  # raised here and now, with nothing of the call in flight
        return self.abort(error, call)

    def tolerates_mismatch(self, call: Call) -> bool:
        """Whether this rank could go on with the communicator if the ranks differed in a call that it makes.

        A blocking call raises here and now, and a caller of other calls in flight can still wait for these. Where a
        call in the background raises, nobody knows which ones the ranks have begun since.
        """
        return call.is_pairwise or not call.background or self._in_flight == [call]

    def abort(self, error: BaseException, *alive: object) -> BaseException:
        """Reject further calls, and end those in flight; keep the owners of all buffers for ever, as MPI may use them.

        Returns
        -------
        BaseException
            The error to raise: MPI's own as PeerFailure, and a timeout with the missing ranks.
        """
        first, self._broken = not self._broken, self._broken or f"an earlier call failed: {error!r}"
        keep_alive(self, *alive)
        if isinstance(error, CollectiveTimeout) and first:
            missing = self.missing.find()
            answers = f"no answer from {named(missing)}" if missing else "all ranks answer"
            error = CollectiveTimeout(f"{error}; {answers}")
        elif isinstance(error, MPI.Exception | PeerFailure):
            dead = self.missing.dead()
            told = str(error) if isinstance(error, PeerFailure) else f"{self.here}: MPI says {error}"
            known = f"; MPI knows that {named(dead)} failed" if dead else ""
            cause = error
            error = PeerFailure(told + known)
            error.__cause__ = cause
        if first:
            self.missing.announce(error)
            self.failure = error
            for other in (*self._in_flight, *self._apart):
                other.end_by(self._failure())
            if self.trace is not None:
                start = time.perf_counter()
                self.trace.save()
                time.sleep(max(GRACE_S, time.perf_counter() - start))
            if self.workers is not None:
                self.workers.dismiss()
        return error

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""

        def abort() -> None:
            self.abort(error)

        if not self._broken:
            self._where_driven(abort)

    def _where_driven(self, task: Callable[[], None]) -> None:
        """Do something in the thread that drives the calls, and wait until it is done."""
        if self._driver is None:
            task()
        else:
            self._driver.submit(task)
            self._driver.flush()

    def leave(self) -> None:
        """Tell the others that this rank's program ends, with which MPI may not be done."""
        if self._in_flight or self._apart:
            keep_alive(self)
        if self.size > 1 and not self._broken:
            self.missing.leave(getattr(sys, "last_value", None))  # of an exception that nobody has caught

    def forked(self) -> None:
        """Reject all calls in a process that was forked from this one, and end those in flight there."""
        self._broken = "this process was forked from a rank, and only the rank can communicate"
        self.failure = self._closed()
        keep_alive(self)
        for call in (*self._in_flight, *self._apart):
            call.end_by(self.failure)
        self._driver = None  # it stays with the parent

    def mark_raised(self) -> None:
        """Note that an error was raised to the caller: later calls then raise CommunicatorClosed."""
        self._raised = self.failure is not None

    def raise_failure(self) -> NoReturn:
        """Raise what the communicator was given up for, in another call than the one that failed."""
        raise self._failure()

    def _failure(self) -> BaseException:
        """What calls end by that did not fail themselves."""
        failure = self.failure
        if isinstance(failure, CollectiveError) and type(failure) is not NonFiniteGradient:
            again = type(failure)(str(failure))
            again.__cause__ = failure
            return again
        return self._closed()

    def _closed(self) -> CommunicatorClosed:
        return CommunicatorClosed(
            f"{self.here}: this communicator cannot be used, {self._broken or 'the program ends'}; make a new one"
        )
