"""Calls of a communicator: all ranks begin them in one order, and agree on each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from typing import Any

from mpi4py import MPI

from collectives.annotations import AnyArray, Testable
from collectives.arrays.elements import Combine, add
from collectives.communicator.ending import Flights, GivingUp
from collectives.communicator.users import Users
from collectives.consistency.call_check import CallCheck
from collectives.execution.handle import Call, Handle, Steps
from collectives.progress.polling import until
from collectives.progress.thread import AHEAD, Completion, is_supported, shared
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic


class Calls:
    """Calls of one communicator, and their order.

    `Communicator` has the methods of this class as its own, bound when it is made. With `verify` the ranks check before
    each collective that they make the same call; `here` is ``"rank 3 of 8"``, for messages.
    """

    def __init__(
        self,
        mpi_comm: MPI.Comm,
        here: str,
        flights: Flights,
        giving_up: GivingUp,
        users: Users,
        call_check: CallCheck,
        verify: bool,
    ) -> None:
        self._mpi_comm, self._here, self._flights, self._giving_up = mpi_comm, here, flights, giving_up
        self._users, self._call_check, self.verify = users, call_check, verify
        self._ordered = flights.ordered
        self.trace: Trace | None = None
        self._thread = 0  # id of the thread that made the calls in flight; 0: no call yet

    # Making calls ----------------------------------------------------------------------------------------------------

    def open(self, call: Call, steps: Steps) -> None:
        """Accept a call, in the order in which all ranks begin their calls.

        Raises
        ------
        CommunicatorClosed
        RuntimeError
            Another thread is in a call of this communicator.
        """
        giving_up, users = self._giving_up, self._users
        if giving_up.unheard is not None:
            giving_up.refuse_if_unheard()
        if giving_up.broken:
            giving_up.refuse(call)
        if users.gone:
            users.free_unused()
        thread = threading.get_ident()
        if self._ordered and self._thread != thread:
            raise RuntimeError(
                f"{self._here}: two threads use one communicator at once, for {call.name()} and "
                f"{self._ordered[0].name()}: give each thread a communicator of its own"
            )
        self._thread = thread
        call.steps = steps
        if call.is_pairwise:
            self._flights.pairwise.append(call)
        else:
            call.tag = users.next_tag()
            self._ordered.append(call)

    def run(self, call: Call, steps: Steps) -> Any:
        """Make a call and wait for its result."""
        driver = self._flights.driver
        if driver is not None:
            driver.reject_waiting(call.name)
            return self.begin(call, steps).wait()
        self.open(call, steps)
        return call.wait()

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background."""
        call.background = True
        if self.trace is not None and call.wait_name is not None:
            steps = _recorded(call, self.trace, steps)
        driver = self._flights.driver
        if driver is not None:
            call.completion = Completion(call, driver)
            driver.submit(partial(self._begin_there, call, steps))
        else:
            self.open(call, steps)
            call.thread.in_flight.append(call)
            call.advance()
        return Handle(call)  # made last: the traceback of an error would keep this frame and with it the handle

    def _begin_there(self, call: Call, steps: Steps) -> None:
        """Make a call in the progress thread; an error is kept for the caller that waits."""
        call.drive_here()
        try:
            self.open(call, steps)
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            call.refuse(error)
        else:
            call.thread.in_flight.append(call)
            call.advance()

    def start_progress_thread(self) -> bool:
        """Let a thread drive all calls from now on; see `Communicator.start_progress_thread`."""
        flights = self._flights
        if flights.driver is None and is_supported(self._mpi_comm):
            if self._ordered:
                raise RuntimeError(f"{self._here}: {self._ordered[0].name()} is in flight; wait for it before")
            flights.driver = shared()
            if self.trace is not None:
                self.trace.driven_since = self.trace.clock()
        return flights.driver is not None

    @property
    def lacks_thread_support(self) -> bool:
        """True if MPI was started in such a way that no progress thread can make calls."""
        return isinstance(self._mpi_comm, MPI.Comm) and not is_supported(self._mpi_comm)

    def advance(self) -> None:
        """Advance every call in flight of this thread, without waiting; no-op if a progress thread does so."""
        if self._flights.driver is None:
            for call in tuple(self._ordered):
                call.advance()

    def turn_of(self, call: Call) -> Steps:
        """Wait until all calls that were begun before have ended.

        Calls that use MPI's own collectives must start them in one order on all ranks, in whichever order calls are
        driven.
        """
        while self._ordered[0] is not call:
            yield False

    def before(self, call: Call) -> Iterable[Call]:
        """Return the calls in flight that were begun before this one."""
        return () if call.is_pairwise else takewhile(lambda one: one is not call, self._ordered)

    def drop(self, call: Call) -> None:
        """Note that a call's caller will never know how it ended; of several calls only the last one is kept."""
        self._flights.dropped = call

    def end(self, call: Call) -> None:
        """Note that a call has ended."""
        calls = self._ordered
        if call.is_pairwise:
            if call in self._flights.pairwise:
                self._flights.pairwise.remove(call)
        elif calls and calls[-1] is call:
            calls.pop()
        elif call in calls:
            at = calls.index(call)
            del calls[at]
            # a progress thread has driven only the first ones, so the others have not waited
            for later in calls[at:] if self._flights.driver is None else calls[at : at + AHEAD]:
                later.excuse()
        if call.background and call in call.thread.in_flight:
            call.thread.in_flight.remove(call)

    # Agreeing --------------------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        """Number a call that ranks compare now, and not only when they begin to compare it."""
        if (self.verify or call.is_compared) and not call.is_pairwise:
            self._call_check.enter(call)

    def check(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: AnyArray | None = None,
        sums: AnyArray | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Raise on every rank unless all make this call; a small vector may be summed in the same messages.

        See `CallCheck.steps`. It must be the first step of a call, since checks are numbered in that order, or follow
        `enter`.
        """
        if not self.verify and values is None:
            call.arrival = 0  # until it ends, as nothing distinguishes a rank that is late from one that is silent
            return iter(())
        if self.trace is not None and meanwhile is not None:
            meanwhile = self.trace.around("prepare", meanwhile)
        steps = self._call_check.steps(call, mark, traffic, values, sums, meanwhile, combine)
        if self.trace is None:
            return steps
        return _traced_check(call, self.trace, steps, {} if values is None else {"bytes": values.nbytes})

    def sum_small(self, call: Call, values: AnyArray, sums: AnyArray, traffic: Traffic) -> Steps:
        """Sum a vector of up to `swapped_bytes` within a call on which the ranks have agreed."""
        yield from self.turn_of(call)
        yield from self._call_check.sum(call, values, sums, traffic)


def await_request(call: Call, request: Testable, describe: Callable[[], str], wait_name: str = "wait") -> Steps:
    """Wait for a request, as part of a call; traces call the wait `wait_name`."""
    call.describe, call.wait_name = describe, wait_name
    call.owners = (*call.owners, request)
    yield from until(request, call)
    call.wait_name = ""


def _recorded(call: Call, trace: Trace, steps: Steps) -> Steps:
    """Record a call in the background from its first step to its last."""
    with trace.span("flight", call.name()):
        yield from steps


def _traced_check(call: Call, trace: Trace, steps: Steps, details: dict[str, int]) -> Steps:
    if call.background:  # its spans would overlap those of other calls
        yield from steps
        return
    call.wait_name = None
    with trace.span("check", "agreement and sum" if details else "agreement", **details):
        yield from steps
    call.wait_name = ""
