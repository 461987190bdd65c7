"""Ends of a communicator: it is closed, left by an exception, or given up after a call that failed.

After a failed call no rank can know which messages are still to come, so all ranks give the communicator up.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

from mpi4py import MPI

from collectives.consistency.missing_ranks import MissingRanks
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    DamagedMessage,
    NonFiniteGradient,
    PeerFailure,
    RanksLost,
)
from collectives.execution.call import Call
from collectives.execution.observer import Observer
from collectives.execution.workers import Workers
from collectives.group.calls import Calls
from collectives.progress.polling import forget_mismatch, keep_alive
from collectives.quoting import list_ranks
from collectives.states import State

if TYPE_CHECKING:
    from collectives.losses import Losses

GRACE_S = 0.5  # time for all ranks to save their traces before one ends the job
CLOSED = "it was closed"  # reason of a state


class Ending:
    """End of all calls of a communicator, here and on the other ranks.

    `kept` own memory that MPI may use until it is finalized, if the communicator ends by an error. `family` has the
    ends of this communicator, of those split from it, and of those it was split from: a death or a damaged message ends
    them together.
    """

    def __init__(
        self, calls: Calls, missing: MissingRanks, workers: Workers | None, losses: Losses, *kept: object
    ) -> None:
        self._calls, self._missing, self._workers, self._losses = calls, missing, workers, losses
        self.kept, self.mpi_comm = kept, missing.comm
        self.observer: Observer | None = None
        # An exception of this rank alone, such as of a signal handler, has left a call: the others regroup without it.
        self.is_left = False
        self.family: WeakSet[Ending] = WeakSet((self,))

    def fail(self, call: Call, error: BaseException) -> BaseException:
        """End a call that has failed, and the communicator if need be; return the error to raise."""
        calls = self._calls
        if calls.failure is not None:
            keep_alive(call)
            return error  # the communicator was given up before, and the missing ranks were found then
        if isinstance(error, NonFiniteGradient):  # on all ranks
            call.owners = ()  # nothing of the call is in flight
            return error
        # the survivors go on, and so do two ranks whose messages to each other differ
        if isinstance(error, RanksLost) or (isinstance(error, CollectiveMismatch) and call.is_pairwise):
            return error
        if isinstance(error, CollectiveMismatch):
            is_alone = calls.ordered == [call]
            if call.background:
                (call.caller or call.thread).mismatch = call
            calls.unseen_mismatch = call if call.background and is_alone else None  # other calls would raise it too
            # A call that was begun while the ranks exchanged descriptions may wait for ranks that do not make it.
            if not error.closes and call.outlasts_mismatch:
                return error  # raised here and now, with nothing of the call in flight
        if isinstance(error, DamagedMessage) and not self._missing.damage:  # found here, where the call is not known
            error = DamagedMessage(f"{call.name()}: {error}")
        return self.abort(error, call)

    def abort(self, error: BaseException, *alive: object) -> BaseException:
        """Reject further calls, and end those in flight; keep the owners of all buffers for ever, as MPI may use them.

        Returns
        -------
        BaseException
            The error to raise: MPI's own as PeerFailure, and a timeout with the missing ranks.
        """
        calls, losses = self._calls, self._losses
        if self._missing.damage and isinstance(error, CollectiveTimeout | MPI.Exception | PeerFailure):
            error = DamagedMessage(self._missing.damage)
        if first := calls.is_open:
            calls.enter(State.GIVEN_UP, f"an earlier call failed: {error!r}")
        keep_alive(self, *alive)
        # A file, before the others know of the error: one of them may end the job.
        folder = calls.history.explain(error) if first else ""
        if isinstance(error, CollectiveTimeout) and first:
            missing = self._missing.find()
            answers = f"no answer from {list_ranks(missing)}" if missing else "all ranks answer"
            error = CollectiveTimeout(f"{error}; {answers}")
            if missing:
                folder = calls.history.explain(error, missing)
        elif isinstance(error, DamagedMessage) and first:
            # Ranks that have ended the call may wait for this one in a part of the communicator.
            for one in (self, *(one for one in self.family if one._calls.is_open)):
                one._missing.announce(error)
            # Until all know: the program may end with this error, and others that outlive it would take that for a
            # death, and go on. At a load of 28 on two cores none of 16 jobs had received it within 0.75 s.
            self._missing.find(losses.can_happen_in(self.mpi_comm))
        elif isinstance(error, MPI.Exception | PeerFailure):
            family = (one.mpi_comm for one in tuple(self.family))
            cause, error = error, losses.failure(error, self.mpi_comm, calls.here, family)
            lost = losses.of(self.mpi_comm)
            if lost and first:
                folder = calls.history.explain(cause, lost)
        if folder and isinstance(error, CollectiveTimeout | PeerFailure):
            with_folder = type(error)(f"{error}; mpicomp analyze {folder} shows the calls of all ranks")
            with_folder.__cause__ = error.__cause__
            error = with_folder
        if first:
            self.is_left = self.recovers and not isinstance(error, CollectiveError)
            if not self.is_left:  # the others would give up too, in place of regrouping
                self._missing.announce(error)
            # The status of a SystemExit is recorded once it is freed, see `collectives.exit_status`.
            calls.failure = calls.closed() if isinstance(error, SystemExit) else error
            for other in calls.in_flight():
                other.end_by(calls.failure_of_another())
            if self.observer is not None:
                start = time.perf_counter()
                self.observer.save()
                time.sleep(max(GRACE_S, time.perf_counter() - start))
            if self._workers is not None:
                self._workers.dismiss()
        return error

    def join(self, other: Ending) -> None:
        """End with another communicator after a death, since this one was split from it."""
        self.family = other.family
        self.family.add(self)

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""
        if self._calls.is_open:
            self._calls.where_driven(partial(self.abort, error))

    def end_quietly(self, state: State, reason: str) -> None:
        """Reject further calls and end those in flight, without a message to other ranks."""
        calls = self._calls
        calls.enter(state, reason)
        calls.failure = calls.closed()
        keep_alive(self)
        for call in calls.in_flight():
            call.end_by(calls.failure)

    def end_by_closing(self) -> None:
        """End the calls in flight of a communicator that is closed."""
        if self._workers is not None:
            self._workers.dismiss()
        self.end_quietly(State.CLOSED, CLOSED)

    def leave(self) -> None:
        """Notify the other ranks that this rank's program ends, with which MPI may not be done."""
        if self._calls.in_flight():
            keep_alive(self)
        if (self.is_left or self._calls.is_open) and self.mpi_comm.size > 1:  # MPI has freed that of a closed one
            self._missing.leave(getattr(sys, "last_value", None), self.is_left)  # of an uncaught exception

    @property
    def has_failed(self) -> bool:
        """A call has failed, so that all ranks give the communicator up."""
        return self._calls.failure is not None and not self._is_closed and not self.is_left

    @property
    def _is_closed(self) -> bool:
        return self._calls.state is State.CLOSED

    @property
    def keeps_requests(self) -> bool:
        """A call had failed or was in flight at the close: MPI may use its memory until it is finalized."""
        return self._is_closed and self._calls.failure is not None

    @property
    def recovers(self) -> bool:
        """The communicator goes on with the ranks that are left after a loss."""
        return self._calls.recovery is not None

    @property
    def is_shared(self) -> bool:
        """The communicator is open, and other ranks use it, or may do so once they need this one."""
        recovery = self._calls.recovery
        return not self._is_closed and (self.mpi_comm.size > 1 or (recovery is not None and recovery.has_pool))

    @property
    def all_left(self) -> bool:
        """All other ranks have sent that their programs end."""
        return self._missing.n_left == self.mpi_comm.size - 1

    @property
    def notices_received(self) -> bool:
        """All other ranks know of `leave_by_error`, or never will."""
        return self._missing.notices_received

    @property
    def has_timed_out(self) -> bool:
        """A rank has not answered, so that the ranks have given the communicator up."""
        return isinstance(self._calls.failure, CollectiveTimeout)

    def dismiss(self) -> None:
        """End the ranks that wait for the loss of others."""
        if self._calls.recovery is not None:
            self._calls.recovery.dismiss()

    @property
    def another_failed(self) -> bool:
        """An uncaught exception has ended another rank of this open communicator."""
        return not self._is_closed and self._missing.another_failed

    def leave_by_error(self) -> None:
        """Notify all other ranks that an uncaught exception ends this one, whose death MPI reports next."""
        if self.mpi_comm.size > 1:
            self._missing.leave_all()

    def leave_block(self, error: BaseException | None) -> None:
        """End the communicator of a ``with`` block that an exception has left; the other ranks are notified."""
        if self._calls.is_open:
            self._calls.enter(State.GIVEN_UP, "it was left by an exception")
            self._missing.leave(error)
        forget_mismatch()
        keep_alive(self)
        if self._workers is not None:
            self._workers.dismiss()
        if self.observer is not None:
            self.observer.save()

    def forked(self) -> None:
        """Reject all calls in a process that was forked from this one, and end those in flight there."""
        self.end_quietly(State.GIVEN_UP, "this process was forked from a rank, and only the rank can communicate")
        self._calls.driver = None  # it stays with the parent
