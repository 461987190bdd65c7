"""Calls under way, from their first step to their result or error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from collectives.arrays import DeviceStream, Queued
from collectives.progress.polling import POLLS, Backoff
from collectives.progress.thread import Completion

if TYPE_CHECKING:
    from collectives.execution.observer import Observer
    from collectives.execution.recovery import Recovery
    from collectives.execution.workers import Workers

Steps = Iterator[bool]
"""Steps of a call: each resumption does a small part of it, never waits, and yields whether anything moved."""

_ENDED: Steps = iter(())


def _nothing() -> str:
    return ""


class CallGroup(Protocol):
    """Group of ranks as calls and executors use it: a `collectives.group.group.Group`.

    Attributes of type Any belong to parts that calls pass on to, which lie above them.
    """

    rank: int
    size: int
    here: str
    timeout: float
    mpi_comm: Any
    workers: Workers | None
    observer: Observer | None
    missing: Any
    calls: Any
    ending: Any
    recovery: Recovery | None

    @property
    def members(self) -> tuple[int, ...]:
        """Rank that each rank had when the group was made."""
        ...

    def given_up(self) -> bool:
        """Return whether another rank has given the group up."""
        ...

    def enter(self, call: Call) -> None:
        """Give a call its number now."""
        ...

    def await_request(self, call: Call, request: Any, describe: Callable[[], str], wait_name: str = ...) -> Steps:
        """Wait for a request, as part of a call."""
        ...


class Call(Backoff):
    """One call of a communicator, from its beginning to its end; `name` returns its description for messages."""

    group: CallGroup
    tag = 0  # of messages of this call alone; set when the communicator registers the call
    number = 0  # among the calls that ranks compare, from 1 on; 0 before the call has one
    step = -1  # of an aggregator; -1: the call has no step
    note: Any = None  # of the group's history, once the call has begun
    steps = _ENDED  # set before the call is driven
    owners: tuple[object, ...] = ()  # own buffers and requests, which must stay alive if the call fails
    result: Any = None  # return value of `wait`
    error: BaseException | None = None  # by which the call ended
    completion: Completion | None = None  # of a call that the progress thread drives; None: the thread that waits does
    # Only two ranks make the call. It has no place in the order of calls: neither does it wait for others, nor do they
    # wait for it.
    is_pairwise = False
    background = False  # the caller has a handle, and `wait` may not have been called yet
    is_compared = False  # also by a communicator that does not verify calls, since the same messages sum
    remake: Callable[[], Steps] | None = None  # returns the steps once more, where the ranks have become others
    standing: Any = None  # of the group's recovery, once the call has begun
    epoch = 0  # how often they had when the call was made, from parts of their group
    lost_by: BaseException | None = None  # error by which the call cannot go on, though its steps wait
    answers = True
    busy = False  # the call is being driven further up the stack
    done = False  # the call has ended, with a result or by an error
    seen = False  # the caller has seen that the call ended
    detached = False  # the handle may be dropped before the call ends
    stream: DeviceStream | None = None  # waits for the last work of a device in the host's place; set at any time
    queued: Queued | None = None  # work of a device for which `stream` waits, though the call has ended
    dropped = False  # the handle was dropped before the call ended, though it was not detached

    def __init__(
        self, group: CallGroup, name: Callable[[], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(group, name, clock)
        if group.recovery is not None:
            self.epoch = group.recovery.count
        self.name = name
        self.label: Callable[[], str] | str = name  # describes the call without keeping its arrays alive

    def brief(self) -> str:
        """Return a short description for a `repr`."""
        name = self.name()
        return str(getattr(name, "brief", name))

    def advance(self) -> bool:
        """Do a small part of the call without waiting; an error is kept until `wait` raises it."""
        if self.busy or self.done:
            return False
        self.busy = True
        try:
            if next(self.steps):
                self.moved()
                return True
            self.idle(rest=False)
            if self.group.calls.failure is not None:
                raise self.group.calls.failure_of_another()
            if self.lost_by is not None:
                raise self.lost_by
        except StopIteration:
            self.owners = ()
            self._release()
        except Exception as error:  # noqa: BLE001 - raised where the call is waited for
            self._recover_or_fail(error)
        except BaseException as error:
            self._fail(error)
            self.error = self.group.calls.failure_of_another()
            raise
        else:
            return False
        finally:
            self.busy = False
        return True

    def wait(self) -> Any:
        """Drive the call to its end and return its result; the other calls of this thread advance meanwhile.

        Raises
        ------
        CollectiveError
            The call ended by this error, or the communicator was given up for that of another call.
        """
        if self.completion is not None:
            self.completion.wait()
            if self.completion.lost:
                raise self.group.calls.failure_of_another()
        elif not self.done:
            if self.busy:
                raise RuntimeError(f"{self.group.here}: a call cannot be waited for from within itself ({self.name()})")
            if self.background:
                self.reject_nesting()
            self.busy = True
            if not self.thread.in_flight:
                self.polls = POLLS
            try:
                while not self._run_through(self.steps):
                    pass
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
                # A handle raises its error again. Here it would be in a cycle of references with its traceback.
                if not self.background:
                    self.error = None
        return self.result

    def _run_through(self, steps: Steps) -> bool:
        """Drive the call by these steps; returns False if others have taken their place."""
        group = self.group
        try:
            for moved in steps:
                if moved:
                    self.moved()
                else:
                    self.idle()
                    if group.calls.failure is not None:
                        raise group.calls.failure_of_another()
                    if self.lost_by is not None:
                        raise self.lost_by
        except Exception as error:
            if not group.calls.recover(error):
                raise
            return False
        return steps is self.steps

    def _recover_or_fail(self, error: BaseException) -> None:
        try:
            if self.group.calls.recover(error):
                return
        except BaseException as worse:  # noqa: BLE001 - raised where the call is waited for
            error = worse
        self._fail(error)

    def reject_nesting(self) -> None:
        """Raise RuntimeError if a call that has to end before is being driven further up the stack."""
        for one in self.group.calls.before(self):
            if one.busy:
                raise RuntimeError(
                    f"{self.group.here}: {self.name()} cannot end within {one.name()}, which ends before it: a signal "
                    "handler must not wait for a call; let it set a flag, and make the call once the other has ended"
                )

    def turn(self) -> Steps:
        """Wait until all calls of the communicator that were begun before have ended."""
        ordered = self.group.calls.ordered
        while ordered[0] is not self:
            yield False

    @property
    def is_alone(self) -> bool:
        """True if no other call of the communicator is in flight."""
        return len(self.group.calls.ordered) == 1

    @property
    def outlasts_mismatch(self) -> bool:
        """True if this rank could go on with the communicator after a mismatch in this call.

        A blocking call raises here and now, and a caller of other calls in flight can still wait for these. Where a
        call in the background raises, the ranks may have begun different calls since.
        """
        return self.is_pairwise or not self.background or self.group.calls.ordered == [self]

    def standstill_s(self, rest: bool) -> float:
        """Return the shortest stall among calls that may have to end first; they have timeouts of their own."""
        # A busy call whose waiting does not drive this one is interrupted, and cannot end before this one.
        moving = (one for one in self.group.calls.before(self) if (not rest if one.busy else one.background))
        return min((one.stalled_s for one in moving), default=math.inf)

    def mark_raised(self) -> None:
        """Record that an error was raised: of this call, or the one for which the communicator was given up."""
        super().mark_raised()
        self.group.calls.mark_raised()

    def mark_seen(self) -> None:
        """Record that the caller has seen that the call ended."""
        self.seen = True

    def end_by(self, error: BaseException) -> None:
        """End the call since the communicator was given up; a busy call ends where it is driven."""
        if not (self.busy or self.done):
            self._fail(error)

    def refuse(self, error: BaseException) -> None:
        """End a call that has not begun."""
        self.error, self.done = error, True
        self.steps, self.describe = _ENDED, _nothing
        if self.completion is not None:
            self.completion.finish()

    def _fail(self, error: BaseException) -> None:
        if isinstance(self.steps, Generator):
            with suppress(BaseException):
                self.steps.throw(error)  # so that they clean up; an error of their own has ended them already
        self.error = self.group.ending.fail(self, error)
        del error  # its traceback may refer to this frame, which would be a cycle of references
        self._release()

    def _release(self) -> None:
        """Drop all references that the call holds, so that no cycle keeps buffers alive."""
        if self.idle_turns:
            self.moved()
        self.done = True
        self.group.calls.end(self)
        self.steps, self.describe, self.remake = _ENDED, _nothing, None
        if self.completion is not None:
            self.completion.finish()
