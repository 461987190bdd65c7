"""A call under way, and the handle that its caller keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol

from mpi4py import MPI

from collectives.annotations import Testable
from collectives.compiling import keep_uncompiled
from collectives.execution.workers import Workers
from collectives.progress.polling import POLLS, Backoff
from collectives.progress.thread import Completion
from collectives.trace.recorder import Trace

Steps = Iterator[bool]
"""Each resumption does one bit of a call, never waits, and yields whether anything moved."""


class CallGroup(Protocol):
    """The communicator, as far as its calls need it: see `collectives.communicator.Communicator`."""

    mpi_comm: MPI.Comm
    here: str
    timeout: float
    arrival_timeout: float
    trace: Trace | None
    workers: Workers | None
    given_up: Callable[[], bool]

    @property
    def failure(self) -> BaseException | None:
        """The error for which the communicator was given up."""
        ...

    def tolerates_mismatch(self, call: Call) -> bool:
        """Whether this rank could go on with the communicator if the ranks differed in a call that it makes."""
        ...

    def enter(self, call: Call) -> None:
        """Give a call that ranks agree on its number now, and not only when they begin to compare it."""
        ...

    def before(self, call: Call) -> Iterable[Call]:
        """Calls in flight that were begun before this one."""
        ...

    def turn_of(self, call: Call) -> Steps:
        """Wait until all calls that were begun before have ended."""
        ...

    def await_request(self, call: Call, request: Testable, describe: Callable[[], str]) -> Steps:
        """Wait for a request, as part of a call."""
        ...

    def drop(self, call: Call) -> None:
        """Take note that a caller will never hear how its call ended."""
        ...

    def end(self, call: Call) -> None:
        """Take note that a call has ended."""
        ...

    def fail(self, call: Call, error: BaseException) -> BaseException:
        """Take note that a call has failed; returns the error to raise."""
        ...

    def mark_raised(self) -> None:
        """Note that an error was raised to the caller."""
        ...

    def raise_failure(self) -> NoReturn:
        """Raise what the communicator was given up for."""
        ...


_ENDED: Steps = iter(())


def _nothing() -> str:
    return ""


class Call(Backoff):
    """One call of a communicator, from its beginning to its end.

    Parameters
    ----------
    group : CallGroup
        The communicator.
    name : callable
        The call in words, for messages.
    clock : callable
        What its waiting is measured by.

    Attributes
    ----------
    owners : tuple
        Of buffers and requests, which must live on if the call fails.
    tag : int
        Of messages of this call alone; set when the communicator takes the call in.
    number : int
        Among the calls that ranks compare, from 1 on; 0: it has none yet.
    steps : iterator of bool
        Must be set before the call is driven; see `Steps`.
    result : object
        What `wait` returns.
    error : BaseException or None
        What the call ended by.
    background : bool
        It was begun by a call that returned at once.
    busy : bool
        It is just being driven.
    is_compared : bool
        Its ranks compare it also where the communicator does not verify calls, since they sum in the same messages.
    done : bool
        It has ended, well or not.
    seen : bool
        Its caller has heard that it ended.
    detached : bool
        Its handle may be let go before.
    dropped : bool
        Its caller has let its handle go before, though it was not detached.
    apart : bool
        Only two ranks make it, so it takes no part in the order of calls: none waits for it, and it waits for none.
    completion : Completion or None
        Of a call that the progress thread drives; None: whoever waits drives it.
    """

    group: CallGroup
    tag = number = 0
    steps = _ENDED
    owners: tuple[object, ...] = ()
    result: Any = None
    error: BaseException | None = None
    completion: Completion | None = None
    apart = background = is_compared = busy = done = seen = detached = dropped = False

    def __init__(
        self, group: CallGroup, name: Callable[[], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(group, name, clock)
        self.name = name

    def advance(self) -> bool:
        """Do one bit of it without waiting; an error is kept for whoever waits for the call."""
        if self.busy or self.done:
            return False
        self.busy = True
        try:
            if next(self.steps):
                self.moved()
                return True
            self.idle(rest=False)
        except StopIteration:
            self.owners = ()
            self._release()
        except Exception as error:  # noqa: BLE001 - raised where the call is waited for
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        else:
            return False
        finally:
            self.busy = False
        return True

    def wait(self) -> Any:
        """Drive the call to its end and return its result; the other calls of this thread move on meanwhile.

        Raises
        ------
        CollectiveError
            What the call ended by, or what another call ended by that took the communicator along.
        """
        if self.completion is not None:
            self.completion.wait()
            if self.completion.lost:
                self.group.raise_failure()
        elif not self.done:
            if self.busy:
                raise RuntimeError(f"{self.group.here}: a call cannot be waited for from within itself ({self.name()})")
            self.busy = True
            group = self.group
            if not self.thread.in_flight:
                self.polls = POLLS
            try:
                for moved in self.steps:
                    if moved:
                        self.moved()
                    else:
                        self.idle()
                        if group.failure is not None:
                            group.raise_failure()
                self.owners = ()
                self._release()
            except BaseException as error:  # noqa: BLE001 - raised below
                self._fail(error)
            finally:
                self.busy = False
        if self.error is not None:
            self.mark_raised()
            try:
                raise self.error
            finally:
                if not self.background:  # nobody asks again, and an error and its traceback would keep each other
                    self.error = None
        return self.result

    def standstill_s(self, rest: bool) -> float:
        """The calls begun before may have to end first, here or on another rank, and have timeouts of their own."""
        # a call that is driven further down the stack, though this one is not driven by its waiting, was interrupted
        moving = (one for one in self.group.before(self) if (not rest if one.busy else one.background))
        return min((one.stalled_s for one in moving), default=math.inf)

    def mark_raised(self) -> None:
        """Note that an error was raised to the caller, of this call or of one that took the communicator along."""
        super().mark_raised()
        self.group.mark_raised()

    def mark_seen(self) -> None:
        """Take note that the caller has heard that the call ended."""
        self.seen = True

    def end_by(self, error: BaseException) -> None:
        """End the call, as the communicator was given up; a call that is just being driven ends where it is driven."""
        if not (self.busy or self.done):
            self._fail(error)

    def refuse(self, error: BaseException) -> None:
        """End a call that never began."""
        self.error, self.done = error, True
        self.steps, self.describe = _ENDED, _nothing
        if self.completion is not None:
            self.completion.finish()

    def _fail(self, error: BaseException) -> None:
        if isinstance(self.steps, Generator):
            with suppress(BaseException):
                self.steps.throw(error)  # where it came from elsewhere, such as the deadline
        self.error = self.group.fail(self, error)
        del error  # its traceback may have this frame, and they would keep each other
        self._release()

    def _release(self) -> None:
        """Let go of all that the call held, so that nothing of it is kept by a cycle of references."""
        if self.idle_turns:
            self.moved()
        self.done = True
        self.group.end(self)
        self.steps, self.describe = _ENDED, _nothing
        if self.completion is not None:
            self.completion.finish()


class Handle:
    """A call that goes on in the background. Keep it until `wait` returns.

    Ranks may poll their handles and wait for them in different orders: whoever waits advances all calls of its thread.
    Between these calls none moves, so a rank that stays away keeps the others waiting. Calls of a communicator with a
    progress thread move by themselves.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    @keep_uncompiled
    def poll(self) -> bool:
        """Make progress with all calls of the thread, without waiting; True once the result is there.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure, CommunicatorClosed
        """
        call = self._call
        if call.completion is None:
            call.advance_all()
        elif call.completion.lost:
            call.group.raise_failure()
        if call.done:
            call.mark_seen()
        if call.error is not None:
            call.mark_raised()
            raise call.error
        return call.done

    test = poll

    @keep_uncompiled
    def wait(self) -> Any:
        """The result; raises what `poll` does."""
        call = self._call
        try:
            if call.group.trace is not None and not call.done and call.wait_name is not None:
                kind = "wait" if call.completion is None else "exposed"
                with call.group.trace.span(kind, f"wait for {call.name()}"):
                    return call.wait()
            return call.wait()
        finally:
            if call.done:
                call.mark_seen()

    def then(self, callback: Callable[[Handle], None]) -> None:
        """Have the progress thread call `callback` with this handle once the call has ended, well or not.

        The callback may begin calls, and must not wait for one. Its handle's `wait` returns or raises at once. An
        exception that it raises is one that nobody catches: it is printed, and ends the job (`install_abort_hook`).

        Raises
        ------
        RuntimeError
            The communicator has no progress thread.
        """
        completion = self._call.completion
        if completion is None:
            raise RuntimeError(f"{self._call.group.here}: only calls that a progress thread drives take callbacks")
        completion.then(partial(callback, self))

    def detach(self) -> None:
        """Allow that this handle is let go without `wait`: the call then ends with a later one, or in ``close()``."""
        self._call.detached = True

    def __del__(self) -> None:
        call = self._call
        if not (call.seen or call.detached):
            call.dropped = True
            call.group.drop(call)
