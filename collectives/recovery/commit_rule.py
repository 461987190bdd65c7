"""The commit rule: a call ends on all ranks or on none, also if one of them dies meanwhile.

When its work is complete on a rank, the rank does not end the call yet: the ranks first pass a barrier of empty
messages (`settled`), and residuals change after it. (Where copies of residuals are due, they change before, and change
back unless all ranks pass: `JointEnd` of aggregators.) If any survivor has passed that barrier, all ranks had completed
the work, so all survivors end the call. Otherwise all survivors roll the call back, and make it again among themselves
from the same input.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from collectives.errors import CollectiveMismatch, NonFiniteGradient, RanksLost
from collectives.execution.call import Call, Steps
from collectives.progress.polling import keep_alive, until
from collectives.recovery.farewell import barrier
from collectives.recovery.fault_tolerance import reports_death

if TYPE_CHECKING:
    from collectives.group.group import Group


@dataclass(slots=True)
class Standing:
    """Standing of a call among those of all ranks."""

    sequence: int  # place in the order in which all ranks begin their calls
    is_settled: bool = False  # all ranks have done their part of the call, which ends without fail


def is_settled(call: Call) -> bool:
    """Return True if all ranks have done their part of a call; that of two ranks alone has no such end."""
    return call.standing is not None and call.standing.is_settled


class CallReport(NamedTuple):
    """Calls of a rank that regroups, by their places in the order of all ranks."""

    begun: int  # the last one
    unsettled: list[int]
    unrepeated: list[int]  # those of the unsettled ones that raise RanksLost


class CommitRule:
    """Calls of one communicator, which end on all ranks or on none.

    Attributes
    ----------
    members : tuple of int
        Rank that each rank had when the communicator was made.
    n_begun : int
        Number of calls in the order of all ranks that have begun.
    unrepeated : dict
        Places of calls that others had begun when they regrouped and do not repeat, with the text of the error.
    """

    members: tuple[int, ...]

    def __init__(self, comm: Group) -> None:
        self.comm, self.n_begun = comm, 0
        self.unrepeated: dict[int, str] = {}

    def around(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call that settles before it ends, also where it ends by an error of all ranks."""
        self.n_begun += 1
        call.standing = Standing(self.n_begun)
        return self._settling(call, steps)

    def _settling(self, call: Call, steps: Steps) -> Steps:
        if lost := self.unrepeated.pop(call.standing.sequence, ""):
            raise self._ranks_lost(call, lost)
        try:
            yield from steps
        except Exception as error:
            if not _ends_alike(error):
                raise
            yield from self.settled(call)
            raise
        yield from self.settled(call)

    def settled(self, call: Call) -> Steps:
        """Return steps that end once all ranks have done their part of a call; at most once for each call."""
        standing = call.standing
        if standing.is_settled:
            return
        steps = self._barrier(call)
        while not standing.is_settled:
            try:
                moved = next(steps)
            except StopIteration:
                standing.is_settled = True
                return
            except MPI.Exception as error:
                if not reports_death(error, self.comm.mpi_comm):
                    raise
                call.lost_by = error
                # the thread that drives the call regroups, and either settles it or throws an error in here
                while not standing.is_settled:
                    yield False
                return
            yield moved

    def _barrier(self, call: Call) -> Steps:
        """Pass a barrier by recursive doubling, with the tag of the call: all its other messages have arrived."""
        comm, here = self.comm.mpi_comm, self.comm.here
        call.describe = lambda: f"{here}: not all ranks have ended {call.name()}"
        for requests in barrier(comm, call.tag):
            call.owners = (*call.owners, *requests)
            for request in requests:
                yield from until(request, call)

    # Once a rank has died --------------------------------------------------------------------------------------------

    def report(self) -> CallReport:
        """Return this rank's calls."""
        open_calls = [call for call in self.comm.calls.ordered if not is_settled(call)]
        unsettled = [call.standing.sequence for call in open_calls]
        return CallReport(self.n_begun, unsettled, [c.standing.sequence for c in open_calls if c.remake is None])

    def settle(self, everyones: Sequence[CallReport], unrepeated: Mapping[int, str]) -> None:
        """Settle the calls in flight that a survivor has ended; `unrepeated` has calls of earlier regroupings."""
        for call in self.comm.calls.ordered:
            place = call.standing.sequence
            if any(place <= one.begun and place not in one.unsettled for one in everyones):
                call.standing.is_settled = True
        lost = {place: "" for one in everyones for place in one.unrepeated if place > self.n_begun}
        self.unrepeated = {**unrepeated, **lost}

    def drop(self) -> list[Call]:
        """Roll back the calls in flight that are not settled; return those that can be made again."""
        again = []
        for call in self.comm.calls.in_flight():
            keep_alive(call.owners)  # MPI may still write there
            call.lost_by = None
            if is_settled(call):
                _finish(call)
            else:
                if isinstance(call.steps, Generator):
                    with suppress(Exception):
                        call.steps.throw(_Again())
                again.append(call)
        return again

    def begin_again(self, again: Iterable[Call], lost: str) -> None:
        """Begin calls once more among the ranks as they are now; `lost` are the dead ones in words."""
        comm = self.comm
        self.unrepeated = dict.fromkeys(self.unrepeated, lost)
        for call in again:
            call.number, call.owners, call.mismatch, call.arrival = 0, (), "", None
            call.moved()
            if not call.is_pairwise:
                call.tag = comm.calls.next_tag()
            comm.calls.history.begin(call)
            if call.remake is None:
                call.steps = raising(self._ranks_lost(call, lost))
            else:
                call.steps = self._settling(call, call.remake())
                comm.enter(call)

    def _ranks_lost(self, call: Call, lost: str) -> RanksLost:
        text = f"{self.comm.here}: {lost} during {call.name()}; the survivors can make the call again"
        return RanksLost(text, self.members)


class _Again(Exception):
    """Thrown into the steps of a call that is made again."""


def _ends_alike(error: BaseException) -> bool:
    """Return True for errors by which a call ends on all ranks, with nothing in flight."""
    return isinstance(error, NonFiniteGradient) or (isinstance(error, CollectiveMismatch) and not error.closes)


def _finish(call: Call) -> None:
    """Run a call to its end, which waits for no rank any more."""
    try:
        for _ in call.steps:
            pass
    except Exception as error:  # noqa: BLE001 - raised where the call is waited for
        call.steps = raising(error)


def raising(error: BaseException) -> Steps:
    """Return steps that raise an error."""
    raise error
    yield False
