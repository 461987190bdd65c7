"""Ranks that make the same calls: how they begin a call, agree on it and carry it out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, NoReturn

from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.call_check import CallCheck, assemble, fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.consistency.recursive_doubling import most_bytes
from collectives.errors import CollectiveMismatch, CollectiveTimeout, marked
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.workers import Workers
from collectives.giving_up import GivingUp
from collectives.memory import Combine, add
from collectives.progress.polling import until, wait
from collectives.progress.process_end import leave_at_exit, reject_in_children
from collectives.progress.thread import AHEAD, Completion, is_supported, shared
from collectives.testable import Testable
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic
from collectives.users import Users


class Group(GivingUp, Users):
    """What every call of a communicator goes through.

    Parameters
    ----------
    parent : MPI.Comm
        Duplicated, which is collective.
    timeout, arrival_timeout : float
        Seconds without progress before a call raises `CollectiveTimeout`, once all ranks have come and before.
    verify : bool
        Check before each collective that all ranks make the same call.

    Attributes
    ----------
    mpi_comm : MPI.Comm
        The duplicate.
    rank, size : int
    local_rank, local_size : int
        The same among the ranks that share this rank's node.
    here : str
        ``"rank 3 of 8"``, for messages.
    one_node : bool
        Whether all ranks share memory.
    swapped_bytes : int
        Longest vector that can be summed together with the check of a call.
    missing : MissingRanks
    trace : Trace or None
    workers : Workers or None
        Threads that share the work on pieces.
    failure : BaseException or None
        What the communicator was given up for.

    Raises
    ------
    CollectiveTimeout
        Names the ranks that do not make the communicator too.
    """

    def __init__(self, parent: MPI.Comm, timeout: float, arrival_timeout: float, verify: bool) -> None:
        self.rank, self.size = parent.rank, parent.size
        self.timeout, self.arrival_timeout = timeout, arrival_timeout
        self.here = f"rank {self.rank} of {self.size}"
        GivingUp.__init__(self)
        Users.__init__(self)
        assemble(parent, arrival_timeout)
        self.mpi_comm = parent.Dup()
        self.mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        node = self.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        self.one_node = self.local_size == self.size
        node.Free()
        self.swapped_bytes = most_bytes(self.size, self.one_node)
        self.trace: Trace | None = None
        self.workers: Workers | None = None
        self._verify = verify
        self.missing = MissingRanks(self.mpi_comm, timeout)
        self._check = CallCheck(self.mpi_comm, self.missing, self.swapped_bytes)
        self.given_up = self.missing.another_gave_up
        self._thread = 0  # id of the thread that made the calls in flight; 0: no call yet
        reject_in_children(self)
        leave_at_exit(self)

    @property
    def calls_in_flight(self) -> int:
        """How many calls have begun and not ended."""
        return len(self._in_flight)

    # Making calls ----------------------------------------------------------------------------------------------------

    def open(self, call: Call, steps: Steps) -> None:
        """Take a call in, in the order that all ranks begin their calls in.

        Raises
        ------
        CommunicatorClosed
        RuntimeError
            Another thread is in a call of this communicator.
        """
        if self._unheard is not None:
            unheard, self._unheard = self._unheard, None
            if not unheard.seen:  # the other ranks may have heard, and not make this call
                raise CollectiveMismatch(str(unheard.error)) from unheard.error
        if self._broken:
            if self.failure is not None and not self._raised:
                call.mark_raised()
                self.raise_failure()
            raise self._closed()
        if self._gone:
            self._free_unused()
        thread = threading.get_ident()
        if self._in_flight and self._thread != thread:
            raise RuntimeError(
                f"{self.here}: two threads use one communicator at once, for {call.name()} and "
                f"{self._in_flight[0].name()}: give each thread a communicator of its own"
            )
        self._thread = thread
        call.steps = steps
        if call.is_pairwise:
            self._apart.append(call)
        else:
            call.tag = self.next_tag()
            self._in_flight.append(call)

    def run(self, call: Call, steps: Steps) -> Any:
        """Make a call and wait for its result."""
        if self._driver is not None:
            self._driver.reject_waiting(call.name)
            return self.begin(call, steps).wait()
        self.open(call, steps)
        return call.wait()

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background."""
        call.background = True
        if self.trace is not None and call.wait_name is not None:
            steps = self._recorded(call, self.trace, steps)
        if self._driver is not None:
            call.completion = Completion(call, self._driver)
            self._driver.submit(partial(self._begin_there, call, steps))
        else:
            self.open(call, steps)
            call.thread.in_flight.append(call)
            call.advance()
        return Handle(call)  # made last: the traceback of an error would keep this frame and with it the handle

    @staticmethod
    def _recorded(call: Call, trace: Trace, steps: Steps) -> Steps:
        """Record a call in the background from its first step to its last."""
        with trace.span("flight", call.name()):
            yield from steps

    def _begin_there(self, call: Call, steps: Steps) -> None:
        """Make a call that was handed to the progress thread; an error is kept for who waits for it."""
        call.drive_here()
        try:
            self.open(call, steps)
        except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
            call.refuse(error)
        else:
            call.thread.in_flight.append(call)
            call.advance()

    def start_progress_thread(self) -> bool:
        """Have a thread of this process drive all calls from now on, while the caller computes. Not collective.

        All communicators of a process share one such thread. Any thread may then make calls; the ranks must still make
        them in one order. A blocking call takes some 50 us longer, for the way to the thread and back.

        Returns
        -------
        bool
            False: MPI was started without MPI_THREAD_MULTIPLE, or the ranks are threads; nothing has changed.

        Raises
        ------
        RuntimeError
            A call is in flight.
        """
        if self._driver is None and is_supported(self.mpi_comm):
            if self._in_flight:
                raise RuntimeError(f"{self.here}: {self._in_flight[0].name()} is in flight; wait for it before")
            self._driver = shared()
            if self.trace is not None:
                self.trace.driven_since = self.trace.clock()
        return self._driver is not None

    @property
    def lacks_thread_support(self) -> bool:
        """Whether MPI was started in such a way that no progress thread can make calls."""
        return isinstance(self.mpi_comm, MPI.Comm) and not is_supported(self.mpi_comm)

    def advance(self) -> None:
        """Do one bit of every call in flight of this thread, without waiting; nothing where a progress thread does."""
        if self._driver is None:
            for call in tuple(self._in_flight):
                call.advance()

    def turn_of(self, call: Call) -> Steps:
        """Wait until all calls that were begun before have ended.

        What uses MPI's own collectives must start them in one order on all ranks, whatever order calls are driven in.
        """
        while self._in_flight[0] is not call:
            yield False

    def before(self, call: Call) -> Iterable[Call]:
        """Calls in flight that were begun before this one."""
        return () if call.is_pairwise else takewhile(lambda one: one is not call, self._in_flight)

    def drop(self, call: Call) -> None:
        """Take note that a caller will never hear how its call ended; of several only the last one is kept."""
        self._dropped = call

    def end(self, call: Call) -> None:
        """Take note that a call has ended."""
        calls = self._in_flight
        if call.is_pairwise:
            if call in self._apart:
                self._apart.remove(call)
        elif calls and calls[-1] is call:
            calls.pop()
        elif call in calls:
            at = calls.index(call)
            del calls[at]
            for later in calls[at:] if self._driver is None else calls[at : at + AHEAD]:  # others have not waited
                later.excuse()
        if call.background and call in call.thread.in_flight:
            call.thread.in_flight.remove(call)

    # Agreeing --------------------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> None:
        """See `CallGroup`."""
        if (self._verify or call.is_compared) and not call.is_pairwise:
            self._check.enter(call)

    def check(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Raise on every rank unless all make this call; a small vector may be summed on the way.

        See `CallCheck.steps`. It must be the first step of a call, since checks are numbered in that order, or follow
        upon `enter`.
        """
        if not self._verify and values is None:
            call.arrival = 0  # until it ends, as nothing tells a rank that is late from one that is silent
            return iter(())
        if self.trace is not None and meanwhile is not None:
            meanwhile = self.trace.around("prepare", meanwhile)
        steps = self._check.steps(call, mark, traffic, values, sums, meanwhile, combine)
        if self.trace is None:
            return steps
        return self._traced_check(call, self.trace, steps, {} if values is None else {"bytes": values.nbytes})

    @staticmethod
    def _traced_check(call: Call, trace: Trace, steps: Steps, told: dict[str, int]) -> Steps:
        if call.background:  # its spans would overlap those of other calls
            yield from steps
            return
        call.wait_name = None
        with trace.span("check", "agreement and sum" if told else "agreement", **told):
            yield from steps
        call.wait_name = ""

    def sum_small(self, call: Call, values: NDArray[Any], sums: NDArray[Any], traffic: Traffic) -> Steps:
        """Sum a vector of up to `swapped_bytes` within a call on which the ranks have agreed."""
        yield from self.turn_of(call)
        yield from self._check.sum(call, values, sums, traffic)

    def agree(self, mark: int, describe: Callable[[], str]) -> None:
        """Raise on every rank unless all make this call; nothing else is done by it."""
        call = Call(self, describe)
        self.run(call, self.check(call, mark))

    def reject(self, error: Exception, call: str) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that made the call.

        Ranks that reject for the same reason at the same time agree, and each raises its own error.
        """
        reason = f"rejects {call}: {error}"
        with suppress(CollectiveMismatch, CollectiveTimeout):  # this rank's own error says more
            self.agree(fingerprint(reason.replace(self.here, "")), lambda: f"rank {self.rank} {reason}")
        raise marked(error) from None

    # Carrying out ----------------------------------------------------------------------------------------------------

    def await_request(
        self, call: Call, request: Testable, describe: Callable[[], str], wait_name: str = "wait"
    ) -> Steps:
        """Wait for a request, as part of a call; traces call the wait `wait_name`."""
        call.describe, call.wait_name = describe, wait_name
        call.owners = (*call.owners, request)
        yield from until(request, call)
        call.wait_name = ""

    def wait(self, request: MPI.Request, describe: Callable[[], str]) -> None:
        """Poll a request of this communicator's up to the timeout; it is no call, so other ranks need not wait too."""
        try:
            wait(request, self.timeout, describe, self.given_up)
        except BaseException as error:
            raise self.abort(error, request) from error
