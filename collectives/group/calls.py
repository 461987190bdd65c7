"""Calls of a communicator, which all ranks begin in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

from mpi4py import MPI

from collectives.annotations import Testable
from collectives.errors import CollectiveError, CollectiveMismatch, CommunicatorClosed, NonFiniteGradient
from collectives.execution.call import Call, Steps
from collectives.execution.handle import Handle
from collectives.execution.observer import History, Observer
from collectives.execution.recovery import Recovery
from collectives.group.users import Users
from collectives.progress.polling import until
from collectives.progress.thread import AHEAD, Completion, ProgressThread, is_supported, shared
from collectives.states import FOLLOWING, State
from collectives.tags import OF_SINGLE_CALLS
from collectives.transports import has_processes

_OPEN = State.OPEN  # looked up once: an attribute of an enumeration costs 0.1 us


class Calls:
    """Calls of one communicator, in the order in which all ranks begin them."""

    here: str
    history: History

    def __init__(self, users: Users) -> None:
        self._users = users
        self.recovery: Recovery | None = None
        self.ordered: list[Call] = []  # calls in flight, in the order in which all ranks begin them
        self.pairwise: list[Call] = []  # calls in flight that only two ranks make, outside that order
        self.inboxes: dict[tuple[int, int], Any] = {}  # of messages between two ranks, by source and tag
        self.dropped: Call | None = None  # the last call whose handle was dropped before the call ended
        self.driver: ProgressThread | None = None  # drives all calls; None: the caller does
        self.state, self.reason = State.OPEN, ""  # `reason` ends the sentence "cannot be used, ..."
        self.failure: BaseException | None = None  # the error for which the communicator was given up
        self.unseen_mismatch: Call | None = None  # ended in the background, perhaps unseen by its caller
        self._refused: list[Call] = []  # by that mismatch, as they were submitted before the caller saw it
        self._failure_was_raised = False
        self._thread = threading.get_ident()  # of the thread that made the calls in flight, or the communicator

    def renew(self, mpi_comm: MPI.Comm, here: str, history: History) -> None:
        """Make calls over this communicator from now on, with tags from the first one on."""
        self._mpi_comm, self.here, self._tag, self.history = mpi_comm, here, 0, history

    def enter(self, state: State, reason: str) -> None:
        """Let no more calls begin, for a reason in words."""
        assert state is self.state or state in FOLLOWING[self.state], (self.state, state)
        self.state, self.reason = state, reason

    @property
    def is_open(self) -> bool:
        """True while calls begin."""
        return self.state is State.OPEN

    def require_open(self) -> None:
        """Raise CommunicatorClosed unless calls begin."""
        if not self.is_open:
            raise self.closed()

    @property
    def driven_by(self) -> object:
        """The thread that drives the calls: the progress thread, or the number of the caller's."""
        return self.driver or self._thread

    def in_flight(self) -> tuple[Call, ...]:
        """Return all calls in flight."""
        return (*self.ordered, *self.pairwise)

    def open(self, call: Call, steps: Steps) -> None:
        """Accept a call, in the order in which all ranks begin their calls.

        Raises
        ------
        CommunicatorClosed
        RuntimeError
            Another thread is in a call of this communicator.
        """
        if self.unseen_mismatch is not None:
            self._raise_unseen_mismatch()
        if self.state is not _OPEN:
            self._raise_ended(call)
        if self.recovery is not None:
            steps = self.recovery.renewed(call, steps)
        if self._users.gone:
            self._users.free_unused()
        thread, ordered = threading.get_ident(), self.ordered
        if ordered and self._thread != thread:
            raise RuntimeError(
                f"{self.here}: two threads use one communicator at once, for {call.name()} and "
                f"{ordered[0].name()}: give each thread a communicator of its own"
            )
        self._thread = thread
        call.steps = steps
        if call.is_pairwise:
            self.pairwise.append(call)
        else:
            ordered.append(call)  # first: an exception of a signal handler from here on ends the call
            call.tag = self.next_tag()
            if self.recovery is not None:
                call.steps = self.recovery.around(call, steps)
        self.history.begin(call)

    def _raise_unseen_mismatch(self) -> None:
        """Raise the mismatch of a call in the background unless its caller has seen it.

        The other ranks may have raised it, and not make the call that is about to begin.
        """
        call, self.unseen_mismatch = self.unseen_mismatch, None
        if call is not None and not call.seen:
            raise CollectiveMismatch(str(call.error)) from call.error

    def _raise_ended(self, call: Call) -> NoReturn:
        """Raise the error of a call that begins too late: the failure if it was never raised, else closed."""
        if self.failure is not None and not self._failure_was_raised:
            call.mark_raised()
            raise self.failure_of_another()
        raise self.closed()

    def next_tag(self) -> int:
        """Return a tag for one call."""
        self._tag = (self._tag + 1) % len(OF_SINGLE_CALLS)
        return OF_SINGLE_CALLS[self._tag]

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background."""
        call.background = True
        observer = call.group.observer
        if observer is not None and call.wait_name is not None:
            steps = observer.around_call(call, steps)
        driver = self.driver
        if driver is not None:
            call.completion = Completion(call, driver)
            found = self.unseen_mismatch
            seen = found if found is not None and any(one.seen for one in (found, *self._refused)) else None
            driver.submit(partial(self._begin_there, call, steps, seen))
        else:
            self.open(call, steps)
            call.thread.in_flight.append(call)
            call.advance()
        return Handle(call)  # made last: the traceback of an error would keep this frame and with it the handle

    def _begin_there(self, call: Call, steps: Steps, seen: Call | None) -> None:
        """Make a call in the progress thread; an error is kept for the caller that waits.

        `seen` is the mismatch that the caller had seen when it submitted the call. All calls that were submitted before
        are refused, not the first one alone: they would wait for ranks that may have raised the mismatch.
        """
        call.drive_here()
        found = self.unseen_mismatch
        try:
            if found is not None:
                if found is not seen:
                    self._refused.append(call)
                    raise CollectiveMismatch(str(found.error)) from found.error
                self.unseen_mismatch, self._refused = None, []
            self.open(call, steps)
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            call.refuse(error)
        else:
            call.thread.in_flight.append(call)
            call.advance()

    def start_progress_thread(self, observer: Observer | None) -> bool:
        """Let a thread drive all calls from now on; False: MPI does not support it."""
        self.require_open()
        if self.driver is None and is_supported(self._mpi_comm):
            if self.ordered:
                raise RuntimeError(f"{self.here}: {self.ordered[0].name()} is in flight; wait for it before")
            self.driver = shared()
            if observer is not None:
                observer.drive_by_thread()
        return self.driver is not None

    @property
    def lacks_thread_support(self) -> bool:
        """True if MPI was started in such a way that no progress thread can make calls."""
        return has_processes(self._mpi_comm) and not is_supported(self._mpi_comm)

    def where_driven(self, task: Callable[[], object]) -> None:
        """Run `task` in the thread that drives the calls, and wait until it is done."""
        if self.driver is None:
            task()
        else:
            self.driver.submit(task)
            self.driver.flush()

    def advance(self) -> None:
        """Advance every call in flight of this thread, without waiting; no-op if a progress thread does so."""
        if self.driver is None:
            for call in tuple(self.ordered):
                call.advance()

    def before(self, call: Call) -> Iterable[Call]:
        """Return the calls in flight that were begun before this one."""
        return () if call.is_pairwise else takewhile(lambda one: one is not call, self.ordered)

    def end_undriven(self, call: Call, error: BaseException) -> None:
        """End a call that an exception of a signal handler has left open, as no caller drives it any more."""
        if call in self.ordered or call in self.pairwise:
            call.busy = False
            call.end_by(error)

    def end(self, call: Call) -> None:
        """Remove a call that has ended."""
        self.history.end(call)
        calls = self.ordered
        if call.is_pairwise:
            if call in self.pairwise:
                self.pairwise.remove(call)
        elif calls and calls[-1] is call:
            calls.pop()
        elif call in calls:
            at = calls.index(call)
            del calls[at]
            # a progress thread has driven only the first ones, so the others have not waited
            for later in calls[at:] if self.driver is None else calls[at : at + AHEAD]:
                later.excuse()
        if call.background and call in call.thread.in_flight:
            call.thread.in_flight.remove(call)

    @property
    def epoch(self) -> int:
        """Number of times that the ranks have become others; equal on all."""
        return 0 if self.recovery is None else self.recovery.count

    def recover(self, error: BaseException) -> bool:
        """Go on after an error, with other steps; returns False if the call ends by it."""
        return self.recovery is not None and self.recovery.recover(error)

    def mark_raised(self) -> None:
        """Record that an error was raised to the caller: later calls then raise CommunicatorClosed."""
        self._failure_was_raised = self.failure is not None

    def failure_of_another(self) -> BaseException:
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
            f"{self.here}: this communicator cannot be used, {self.reason or 'the program ends'}; make a new one"
        )


def await_request(call: Call, request: Testable, describe: Callable[[], str], wait_name: str = "wait") -> Steps:
    """Wait for a request, as part of a call; traces call the wait `wait_name`."""
    call.describe, call.wait_name = describe, wait_name
    call.owners = (*call.owners, request)
    yield from until(request, call)
    call.wait_name = ""
