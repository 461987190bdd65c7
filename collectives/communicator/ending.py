"""Ends of a communicator: it is closed, left by an exception, or given up after a call that failed.

After a failed call no rank can know which messages are still to come, so all ranks give the communicator up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from mpi4py import MPI

from collectives.consistency.call_check import CallCheck, fingerprint
from collectives.consistency.missing_ranks import MissingRanks, list_ranks
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NonFiniteGradient,
    PeerFailure,
)
from collectives.execution.handle import Call, Steps
from collectives.execution.workers import Workers
from collectives.progress.polling import forget_mismatch, keep_alive, until
from collectives.progress.thread import ProgressThread
from collectives.trace.recorder import Trace, compare_clocks

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator

GRACE_S = 0.5  # time for all ranks to save traces before one ends the job
_CLOSED = "it was closed"


class Flights:
    """Calls of a communicator that are under way.

    Attributes
    ----------
    ordered : list of Call
        In the order in which all ranks begin them.
    pairwise : list of Call
        Calls that only two ranks make, outside that order.
    dropped : Call or None
        The last one that its caller let go without waiting.
    driver : ProgressThread or None
        Thread that drives all calls; None: the caller does.
    """

    def __init__(self) -> None:
        self.ordered: list[Call] = []
        self.pairwise: list[Call] = []
        self.dropped: Call | None = None
        self.driver: ProgressThread | None = None

    def where_driven(self, task: Callable[[], None]) -> None:
        """Run `task` in the thread that drives the calls, and wait until it is done."""
        if self.driver is None:
            task()
        else:
            self.driver.submit(task)
            self.driver.flush()


class Ending:
    """End of all calls of a communicator, here and on the other ranks.

    Attributes
    ----------
    broken : str
        Reason why there are no more calls; empty while there are.
    failure : BaseException or None
        The error for which the communicator was given up.
    raised : bool
        The failure was raised to the caller.
    unseen_mismatch : Call or None
        A call in the background that ended by a mismatch, which its caller may not have seen yet.
    kept : tuple
        Owners of memory that MPI may use until it is finalized, if the communicator ends by an error.
    trace : Trace or None
    """

    def __init__(
        self, flights: Flights, missing: MissingRanks, here: str, size: int, workers: Workers | None, *kept: object
    ) -> None:
        self._flights, self._missing, self._here, self._size, self._workers = flights, missing, here, size, workers
        self.kept = kept
        self.broken = ""
        self.failure: BaseException | None = None
        self.raised = False
        self.unseen_mismatch: Call | None = None
        self.trace: Trace | None = None

    def raise_unseen_mismatch(self) -> None:
        """Raise the mismatch of a call in the background unless its caller has seen it.

        The other ranks may have raised it, and not make the call that is about to begin.
        """
        call, self.unseen_mismatch = self.unseen_mismatch, None
        if call is not None and not call.seen:
            raise CollectiveMismatch(str(call.error)) from call.error

    def raise_broken(self, call: Call) -> NoReturn:
        """Raise the error of a call that begins too late: the failure where it was never raised, else closed."""
        if self.failure is not None and not self.raised:
            call.mark_raised()
            self.raise_failure()
        raise self.closed()

    def fail(self, call: Call, error: BaseException) -> BaseException:
        """End a call that has failed, and the communicator if need be; return the error to raise."""
        if self.failure is not None:
            keep_alive(call)
            return error  # the communicator was given up before, and the missing ranks were found then
        if isinstance(error, NonFiniteGradient):  # on all ranks
            call.owners = ()  # nothing of the call is in flight
            return error
        if isinstance(error, CollectiveMismatch) and call.is_pairwise:
            return error
        if isinstance(error, CollectiveMismatch):
            is_alone = self._flights.ordered == [call]
            if call.background:
                (call.caller or call.thread).mismatch = call
            self.unseen_mismatch = call if call.background and is_alone else None  # other calls would raise it as well
            # A call that was begun while the ranks exchanged descriptions may wait for ranks that do not make it.
            if not error.closes and self.tolerates_mismatch(call):
                return error  # raised here and now, with nothing of the call in flight
        return self.abort(error, call)

    def tolerates_mismatch(self, call: Call) -> bool:
        """Return True if this rank could go on with the communicator after a mismatch in this call.

        A blocking call raises here and now, and a caller of other calls in flight can still wait for these. Where a
        call in the background raises, the ranks may have begun different calls since.
        """
        return call.is_pairwise or not call.background or self._flights.ordered == [call]

    def abort(self, error: BaseException, *alive: object) -> BaseException:
        """Reject further calls, and end those in flight; keep the owners of all buffers for ever, as MPI may use them.

        Returns
        -------
        BaseException
            The error to raise: MPI's own as PeerFailure, and a timeout with the missing ranks.
        """
        first, self.broken = not self.broken, self.broken or f"an earlier call failed: {error!r}"
        keep_alive(self, *alive)
        if isinstance(error, CollectiveTimeout) and first:
            missing = self._missing.find()
            answers = f"no answer from {list_ranks(missing)}" if missing else "all ranks answer"
            error = CollectiveTimeout(f"{error}; {answers}")
        elif isinstance(error, MPI.Exception | PeerFailure):
            dead = self._missing.dead()
            text = str(error) if isinstance(error, PeerFailure) else f"{self._here}: MPI says {error}"
            known = f"; MPI knows that {list_ranks(dead)} failed" if dead else ""
            cause = error
            error = PeerFailure(text + known)
            error.__cause__ = cause
        if first:
            self._missing.announce(error)
            self.failure = error
            for other in (*self._flights.ordered, *self._flights.pairwise):
                other.end_by(self._failure())
            if self.trace is not None:
                start = time.perf_counter()
                self.trace.save()
                time.sleep(max(GRACE_S, time.perf_counter() - start))
            if self._workers is not None:
                self._workers.dismiss()
        return error

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""

        def abort() -> None:
            self.abort(error)

        if not self.broken:
            self._flights.where_driven(abort)

    def end_quietly(self, reason: str) -> None:
        """Reject further calls and end those in flight, without a word to other ranks."""
        self.broken = reason
        self.failure = self.closed()
        keep_alive(self)
        for call in (*self._flights.ordered, *self._flights.pairwise):
            call.end_by(self.failure)

    def end_by_closing(self) -> None:
        """End the calls in flight of a communicator that is closed."""
        if self._workers is not None:
            self._workers.dismiss()
        self.end_quietly(_CLOSED)

    def leave(self) -> None:
        """Notify the other ranks that this rank's program ends, with which MPI may not be done."""
        if self._flights.ordered or self._flights.pairwise:
            keep_alive(self)
        if self._size > 1 and not self.broken:
            self._missing.leave(getattr(sys, "last_value", None))  # of an uncaught exception

    def leave_block(self, error: BaseException | None) -> None:
        """End the communicator of a ``with`` block that an exception has left; the other ranks are notified."""
        if not self.broken:
            self.broken = "it was left by an exception"
            self._missing.leave(error)
        forget_mismatch()
        keep_alive(self)
        if self._workers is not None:
            self._workers.dismiss()
        if self.trace is not None:
            self.trace.save()

    def forked(self) -> None:
        """Reject all calls in a process that was forked from this one, and end those in flight there."""
        self.end_quietly("this process was forked from a rank, and only the rank can communicate")
        self._flights.driver = None  # it stays with the parent

    def mark_raised(self) -> None:
        """Record that an error was raised to the caller: later calls then raise CommunicatorClosed."""
        self.raised = self.failure is not None

    def raise_failure(self) -> NoReturn:
        """Raise the error for which the communicator was given up, in another call than the one that failed."""
        raise self._failure()

    def _failure(self) -> BaseException:
        """Return the error by which calls end that did not fail themselves."""
        failure = self.failure
        if isinstance(failure, CollectiveError) and type(failure) is not NonFiniteGradient:
            again = type(failure)(str(failure))
            again.__cause__ = failure
            return again
        return self.closed()

    def closed(self) -> CommunicatorClosed:
        """Return the error of a call on a communicator that has ended."""
        return CommunicatorClosed(
            f"{self._here}: this communicator cannot be used, {self.broken or 'the program ends'}; make a new one"
        )


def close(
    comm: Communicator,
    flights: Flights,
    ending: Ending,
    call_check: CallCheck | None,
    free: Iterable[Callable[[], None]],
) -> None:
    """Close a communicator; see `Communicator.close`.

    Parameters
    ----------
    comm : Communicator
    flights, ending
        Parts of it.
    call_check : CallCheck or None
        Part of it by which the ranks compare the call; None: they do not.
    free : iterable of callable
        Functions that free memory and requests of it.
    """
    if ending.broken:
        return
    if flights.driver is not None:
        flights.driver.flush()
    for call in tuple(flights.ordered):
        call.wait()
    if comm.size > 1:
        closing = Call(comm, lambda: "close()")
        closing.wait_name = None  # traces are of the caller's own calls
        comm.run(closing, _agree_on_closing(closing, call_check))
    if flights.pairwise:
        # these calls do not concern all ranks, and their requests stay with MPI
        flights.where_driven(ending.end_by_closing)
        return
    if comm.trace is not None:
        comm.trace.readings.append(compare_clocks(comm.mpi_comm, comm.trace.clock, comm.timeout))
    ending.broken = _CLOSED
    if comm.workers is not None:
        comm.workers.close()
    for function in free:
        function()
    if comm.trace is not None:
        comm.trace.write()
    dropped = flights.dropped
    if dropped is not None and not dropped.seen:
        raise RuntimeError(f"{comm.here}: {dropped.name()} was begun and never waited for: keep what begin returns")


def _agree_on_closing(call: Call, call_check: CallCheck | None) -> Steps:
    """Agree on closing, and receive all that the ranks have sent besides their calls: MPI would keep it."""
    comm, missing = call.group.mpi_comm, call.group.missing
    call.arrival = 0
    if call_check is not None:
        yield from call_check.steps(call, fingerprint("close()"))
    sent, received = missing.stop_sending()
    to_receive, ones = np.zeros(comm.size, np.int64), np.ones(comm.size, np.int32)
    request = comm.Ialltoallv([sent, ones, MPI.INT64_T], [to_receive, ones, MPI.INT64_T])
    problem = f"{call.group.here}: not all ranks close the communicator"
    call.describe, call.owners = lambda: problem, (request, to_receive)
    yield from until(request, call)
    while (received < to_receive).any():
        missing.receive_messages()
        yield False
