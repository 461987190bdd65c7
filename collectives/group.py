"""Ranks that make the same calls: how they agree on a call, carry it out, and give up together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar
from weakref import ref

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.assembly import assemble
from collectives.consistency.call_check import CallCheck, fingerprint
from collectives.consistency.missing_ranks import MissingRanks, named
from collectives.consistency.recursive_doubling import most_bytes
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorClosed,
    NonFiniteGradient,
    PeerFailure,
    marked,
)
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.requests import Cache, free_all
from collectives.memory import Combine, add
from collectives.progress.departure import tell_at_exit
from collectives.progress.fork import reject_in_children
from collectives.progress.polling import Testable, keep_alive, until, wait
from collectives.progress.thread import Completion, ProgressThread, is_supported, shared
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic

FIXED_TAGS = 16_000  # tags below are of long-lived users, and as many more from there on of single calls
GRACE_S = 0.5  # time for all ranks to save traces before one ends the job

_Kind = TypeVar("_Kind")


class Group:
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
        self.failure: BaseException | None = None
        self._broken = ""
        self._in_flight: list[Call] = []
        self._apart: list[Call] = []  # in flight too, and outside the order of calls
        self._dropped: Call | None = None
        self._unheard: Call | None = None  # whose mismatch its caller may not have heard of
        assemble(parent, arrival_timeout)
        self.mpi_comm = parent.Dup()
        self.mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        node = self.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = node.rank, node.size
        self.one_node = self.local_size == self.size
        node.Free()
        self.swapped_bytes = most_bytes(self.size, self.one_node)
        self.trace: Trace | None = None
        self._verify = verify
        self.missing = MissingRanks(self.mpi_comm, timeout)
        self._check = CallCheck(self.mpi_comm, self.missing, self.swapped_bytes)
        self.given_up = self.missing.another_gave_up
        self._driver: ProgressThread | None = None
        self._fixed_tag, self._rolling_tag = 0, 0
        self._common: dict[type[object], object] = {}
        self._thread = 0  # id of the thread that made the calls in flight; 0: no call yet
        self._held: dict[int, tuple[ref[object], Callable[[], None]]] = {}  # by the reference's identity
        self._gone: list[ref[object]] = []
        reject_in_children(self)
        tell_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            if not self._broken:
                self._broken = "it was left by an exception"
                self.missing.leave()
            keep_alive(self)
            if self.trace is not None:
                self.trace.save()

    def __del__(self) -> None:
        # a call under way that nobody waits for any more: MPI goes on writing to its buffers
        if getattr(self, "_in_flight", None):
            keep_alive(self)

    def close(self) -> None:
        """Free the MPI communicator (collective). After an error it is left to MPI's own clean-up instead.

        Raises
        ------
        CollectiveMismatch
            Other ranks make another call. The communicator stays open.
        RuntimeError
            A call was let go without waiting for it.
        OSError
            The trace cannot be written.
        """
        if self._broken:
            return
        if self._driver is not None:
            self._driver.flush()
        for call in tuple(self._in_flight):
            call.wait()
        if self.size > 1:
            closing = Call(self, lambda: "close()")
            closing.wait_name = None  # traces are of what the caller calls
            self.run(closing, self._closing(closing))
        if self._apart:
            self._where_driven(self._leave_apart)
            return
        self._before_free()
        self._broken = "it was closed"
        self._free()
        dropped = self._dropped
        if dropped is not None and not dropped.seen:
            raise RuntimeError(f"{self.here}: {dropped.name()} was begun and never waited for: keep what begin returns")

    def _closing(self, call: Call) -> Steps:
        """Agree on closing, and take what the ranks have told each other beside their calls: MPI would keep it."""
        call.arrival = 0
        if self._verify:
            yield from self._check.steps(call, fingerprint("close()"))
        sent, heard = self.missing.fall_silent()
        to_hear, ones = np.zeros(self.size, np.int64), np.ones(self.size, np.int32)
        request = self.mpi_comm.Ialltoallv([sent, ones, MPI.INT64_T], [to_hear, ones, MPI.INT64_T])
        call.describe, call.owners = lambda: f"{self.here}: not all ranks close the communicator", (request, to_hear)
        yield from until(request, call)
        while (heard < to_hear).any():
            self.missing.hear()
            yield False

    def leave(self) -> None:
        """Tell the others that this rank's program ends, with which MPI may not be done."""
        if self._in_flight or self._apart:
            keep_alive(self)
        if self.size > 1 and not self._broken:
            self.missing.leave()

    def _leave_apart(self) -> None:
        """Close with calls in flight that other ranks need not know of: their requests stay with MPI."""
        self._broken = "it was closed"
        self.failure = self._closed()
        keep_alive(self)
        for call in tuple(self._apart):
            call.end_by(self.failure)

    def _where_driven(self, task: Callable[[], None]) -> None:
        """Do something in the thread that drives the calls, and wait until it is done."""
        if self._driver is None:
            task()
        else:
            self._driver.submit(task)
            self._driver.flush()

    def _before_free(self) -> None:
        """Do what takes communication, at the end."""

    def _free(self) -> None:
        for _, free in self._held.values():
            free()
        self._held.clear()
        self._check.free()
        self.mpi_comm.Free()

    def free_after(self, owner: object, free: Callable[[], None]) -> None:
        """Have a long-lived user's persistent requests freed when it is gone, at the next call, or when this is closed.

        Not by a finalizer, which may run in any thread, and at a time when MPI is not to be called. Until then the
        requests' buffers stay, too.

        Parameters
        ----------
        owner : object
            The user; referred to weakly.
        free : callable
            Frees its requests, of which none is active when it is called; holds no reference to `owner`.
        """
        user = ref(owner, self._gone.append)
        self._held[id(user)] = user, free

    def _free_unused(self) -> None:
        while self._gone:
            _, free = self._held.pop(id(self._gone.pop()))
            free()

    def persistent(self, owner: object) -> Cache:
        """Where a long-lived user keeps the persistent requests of one program on the same buffers."""
        cache: Cache = {}
        self.free_after(owner, partial(free_all, cache))
        return cache

    def fixed_tag(self) -> int:
        """A tag for one long-lived user of this communicator; all ranks ask in the same order."""
        self._fixed_tag = self._fixed_tag % (FIXED_TAGS - 1) + 1
        return self._fixed_tag

    def common(self, kind: type[_Kind]) -> _Kind:
        """The object of this kind that all long-lived users of this communicator share on this rank."""
        found = self._common.setdefault(kind, kind())
        assert isinstance(found, kind)
        return found

    @contextmanager
    def tags_unused(self) -> Iterator[None]:
        """Long-lived users made in this block never communicate: their tags are given out again."""
        before = self._fixed_tag
        try:
            yield
        finally:
            self._fixed_tag = before

    def next_tag(self) -> int:
        """A tag for one call; all ranks ask in the same order."""
        self._rolling_tag = (self._rolling_tag + 1) % FIXED_TAGS
        return FIXED_TAGS + self._rolling_tag

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
        if call.apart:
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

    def tolerates_mismatch(self, call: Call) -> bool:
        """Whether this rank could go on with the communicator if the ranks differed in a call that it makes.

        A blocking call raises here and now, and a caller of other calls in flight can still wait for these. Where a
        call in the background raises, nobody knows which ones the ranks have begun since.
        """
        return call.apart or not call.background or self._in_flight == [call]

    def before(self, call: Call) -> Iterable[Call]:
        """Calls in flight that were begun before this one."""
        return () if call.apart else takewhile(lambda one: one is not call, self._in_flight)

    def drop(self, call: Call) -> None:
        """Take note that a caller will never hear how its call ended; of several only the last one is kept."""
        self._dropped = call

    def end(self, call: Call) -> None:
        """Take note that a call has ended."""
        calls = self._in_flight
        if call.apart:
            if call in self._apart:
                self._apart.remove(call)
        elif calls and calls[-1] is call:
            calls.pop()
        elif call in calls:
            at = calls.index(call)
            del calls[at]
            for later in calls[at:]:
                later.excuse()
        if call.background and call in call.thread.in_flight:
            call.thread.in_flight.remove(call)

    # Agreeing --------------------------------------------------------------------------------------------------------

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

        See `CallCheck.steps`. It must be the first step of a call, since checks are numbered in that order.
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

    # Giving up -------------------------------------------------------------------------------------------------------

    def fail(self, call: Call, error: BaseException) -> BaseException:
        """Take note that a call has failed; returns the error to raise."""
        if self.failure is not None:
            keep_alive(call)
            return error  # the communicator was given up before, and the ranks were asked then
        if isinstance(error, NonFiniteGradient):  # on all ranks
            call.owners = ()  # nothing of the call is in flight
            return error
        if isinstance(error, CollectiveMismatch) and call.apart:
            return error
        if isinstance(error, CollectiveMismatch):
            self._unheard = call if call.background and self._in_flight == [call] else None  # else others tell of it
            # a call that was begun while the ranks told each other what they called may wait for ranks that do not
            # make it
            if not error.closes and self.tolerates_mismatch(call):
                return error  # raised here and now, with nothing of the call in flight
        return self.abort(error, call)

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
            self.missing.announce()
            self.failure = error
            for other in (*self._in_flight, *self._apart):
                other.end_by(self._failure())
            if self.trace is not None:
                start = time.perf_counter()
                self.trace.save()
                time.sleep(max(GRACE_S, time.perf_counter() - start))
        return error

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""

        def abort() -> None:
            self.abort(error)

        if not self._broken:
            self._where_driven(abort)

    def forked(self) -> None:
        """Reject all calls in a process that was forked from this one, and end those in flight there."""
        self._broken = "this process was forked from a rank, and only the rank can communicate"
        self.failure = self._closed()
        keep_alive(self)
        for call in (*self._in_flight, *self._apart):
            call.end_by(self.failure)

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
        return CommunicatorClosed(f"{self.here}: this communicator cannot be used, {self._broken}; make a new one")
