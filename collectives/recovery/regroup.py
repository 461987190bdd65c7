"""Regrouping: after the death of a rank the survivors make a new group, and end or repeat the calls in flight.

**The commit rule.** A call ends on all survivors or on none. When its work is complete on a rank, the rank does not end
it yet: the ranks first pass a barrier of empty messages (`settled`), and residuals change after it. (Where copies of
residuals are due, they change before, and change back unless all ranks pass: `JointEnd` of aggregators.) If any
survivor has passed that barrier, all ranks had completed the work, so all survivors end the call. Otherwise all
survivors roll the call back, and make it again among themselves from the same input.

**Regrouping.** An error of MPI on one rank reaches all: it revokes the communicator, whose requests then fail on all
ranks. MPI makes a communicator of the survivors. They exchange which calls they have begun and ended, decide by the
rule above, and renew all that depends on the group: ranks, nodes, routes, tags, and the parts of aggregators. In the
end they agree that all of them have done so; if another rank has died meanwhile, all begin again from the same states.

With several communicators, ranks that wait elsewhere answer: `collectives.recovery.answers`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from mpi4py import MPI

from collectives.arrays.vectors import Flat
from collectives.consistency.descriptions import gather_objects
from collectives.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    DamagedMessage,
    NonFiniteGradient,
    PeerFailure,
    RanksLost,
)
from collectives.execution.handle import Call, Steps
from collectives.progress.polling import SLEEP_S, keep_alive, until
from collectives.progress.thread import is_supported
from collectives.quoting import list_ranks
from collectives.recovery.answers import answering
from collectives.recovery.farewell import Farewell, barrier
from collectives.recovery.fault_tolerance import (
    agree,
    await_death,
    is_revoked,
    look,
    may_repeat,
    reports_death,
    revoke,
    with_survivors,
)
from collectives.schedules.plan import TopologyError
from collectives.states import State
from collectives.transports import carrier

if TYPE_CHECKING:
    from collectives.group.group import Group
    from collectives.nodes.layout import NodeLayout
    from collectives.recovery.newcomers import Newcomers

_Made = TypeVar("_Made")
_log = logging.getLogger("collectives")


class Survivor(Protocol):
    """Long-lived user of a communicator that goes on with the ranks that are left, such as an aggregator."""

    def save(self) -> Any:
        """Return all that the next step depends on; called once the calls in flight have been rolled back."""
        ...

    def describe(self) -> str:
        """Return its kind, options and tag, which are equal on all ranks."""
        ...

    def enter(self, peers: Any) -> Any:
        """Return the state from which a newcomer goes on, of a peer's `save`."""
        ...

    def restart(self, saved: Any) -> None:
        """Begin with the ranks as they are now, before any step: others have yet to make theirs; not collective."""
        ...

    def renew(self, saved: Any, survivors: tuple[int, ...]) -> Mapping[int, int | None]:
        """Continue from `save` on the communicator as it is now, whose ranks were `survivors` before; collective.

        Returns
        -------
        dict
            Age in steps of each dead rank's residual that a survivor has taken over, None for a lost one; empty: there
            are no copies of residuals.
        """
        ...


class SavedUser(NamedTuple):
    """Long-lived user with its state."""

    place: int  # in the order of joining
    name: str  # of `Survivor.describe`
    user: Survivor
    state: Any


@dataclass(slots=True)
class Standing:
    """Standing of a call among those of all ranks."""

    sequence: int  # place in the order in which all ranks begin their calls
    is_settled: bool = False  # all ranks have done their part of the call, which ends without fail


def is_settled(call: Call) -> bool:
    """Return True if all ranks have done their part of a call; that of two ranks alone has no such end."""
    return call.standing is not None and call.standing.is_settled


class _Tries:
    """State of regrouping over all tries, until no rank dies meanwhile."""

    def __init__(self, comm: Group, unrepeated: Mapping[int, str]) -> None:
        self.group, self.layouts = comm.mpi_comm.Get_group(), (comm.layout, comm.hosts)
        self.of_nodes = [one.node_of for one in comm.levels]
        self.has_failure, self.unrepeated = comm.missing.another_failed, unrepeated
        self.users: list[tuple[str, int, Survivor]] = []
        self.saved: list[SavedUser] | None = None
        self.again: list[Call] = []  # calls in flight that are made again
        self.ages: list[Mapping[int, int | None]] = []  # of residuals
        self.damage, self.is_closing = "", False


class Regroup:
    """Calls and users of one communicator that go on after ranks have died.

    Parameters
    ----------
    comm : Group
    on_death : callable
        Called before the survivors regroup.
    on_error : callable
        Called if a rank died of an uncaught exception; on all survivors.
    members : sequence of int
        Rank that each rank has in the job.

    Attributes
    ----------
    members : tuple of int
        Rank that each rank had when the communicator was made.
    count : int
        How often the ranks have become others: survivors have regrouped, or newcomers have joined them. Equal on all.
    is_active : bool
        The survivors regroup now: calls of the communicator are not possible, calls of MPI are.
    thread : int
        Number of the thread that regroups, or has regrouped last.
    has_met : bool
        Set when the survivors regroup, where one of them has come by `meet`.
    """

    def __init__(
        self, comm: Group, on_death: Callable[[], None], on_error: Callable[[], None], members: Iterable[int]
    ) -> None:
        self.comm, self.on_death, self._on_error = comm, on_death, on_error
        self.members, self.count = tuple(members), 0
        self.has_met = self._meets = False
        # with their places in the order of joining, and the functions that return views of them
        self._users: WeakKeyDictionary[Any, tuple[int, Callable[[Any], Survivor]]] = WeakKeyDictionary()
        self.n_joined = self._begun = 0  # users that this rank has made; calls in the order of all ranks
        # Places of calls that others had begun when they regrouped and do not repeat, with the text of the error.
        self._unrepeated: dict[int, str] = {}
        self._damages: list[str] = []  # texts of damaged messages that this rank has received while it regroups
        self.is_active = False
        self.thread = 0
        self.newcomers: Newcomers | None = None

    # The commit rule -------------------------------------------------------------------------------------------------

    def renewed(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call that begins now: other ones if the ranks have regrouped since it was made.

        With a progress thread a call may be made while that thread regroups. Its steps then refer to a check, buffers
        and random words of the old group. Calls without `remake` find all of these at their first step.
        """
        while self.is_active and self.thread != get_ident():
            time.sleep(SLEEP_S)
        if call.remake is None or call.epoch == self.count:
            return steps
        call.epoch = self.count
        return call.remake()

    def around(self, call: Call, steps: Steps) -> Steps:
        """Return the steps of a call that settles before it ends, also where it ends by an error of all ranks."""
        self._begun += 1
        call.standing = Standing(self._begun)
        return self._settling(call, steps)

    def _settling(self, call: Call, steps: Steps) -> Steps:
        if lost := self._unrepeated.pop(call.standing.sequence, ""):
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

    def from_copy(self, source: Flat, target: Flat, steps: Callable[[], Steps]) -> Callable[[], Steps]:
        """Return `steps` for repetition: from a copy of the array if the result takes its memory."""
        if not source.overlaps(target):
            return steps
        values = source.values
        copy = values.copy() if isinstance(values, np.ndarray) else values.clone()

        def again() -> Steps:
            values[:] = copy
            return steps()

        return again

    # Regrouping ------------------------------------------------------------------------------------------------------

    @property
    def has_pool(self) -> bool:
        """True if ranks wait for a death; perhaps this one does."""
        return self.newcomers is not None

    def dismiss(self) -> None:
        """End the ranks that wait for a death."""
        if self.newcomers is not None:
            self.newcomers.dismiss()

    def look(self) -> None:
        """Raise the error of MPI if a rank has died, for steps that wait without messages."""
        look(self.comm.mpi_comm)

    def complete(self, make: Callable[[], _Made]) -> _Made:
        """Return the result of a blocking call of MPI, in which all survivors take part."""
        comm = self.comm
        text = f"{comm.here}: a rank has died, and not all survivors come to regroup"
        return with_survivors(make, comm.arrival_timeout, lambda: text)

    def join(self, user: Any, view: Callable[[Any], Survivor] = lambda user: user) -> None:
        """Renew a long-lived user, by a view of it, whenever the survivors regroup. Ranks make theirs in one order."""
        self.n_joined += 1
        self._users[user] = self.n_joined, view

    def recover(self, error: BaseException) -> bool:
        """Regroup if an error is due to the death of a rank, and settle or begin again the calls in flight.

        The thread's other communicators that had the dead rank regroup, too.

        Returns
        -------
        bool
            False: the error has another reason.

        Raises
        ------
        PeerFailure
            The survivors cannot go on; on all of them.
        CollectiveTimeout
            A survivor does not come.
        DamagedMessage
            The dead rank has received a damaged message, or a survivor while they regrouped, which ends the calls of
            all.
        """
        comm = self.comm
        if comm.calls.state is State.CLOSING:
            return reports_death(error, comm.mpi_comm)  # of a call that has ended, and waits a last time
        if self.is_active or not comm.calls.is_open or not self._is_death(error):
            return False
        if damage := comm.missing.damage_elsewhere():
            raise DamagedMessage(damage)
        self._run()
        return True

    def _run(self) -> None:
        start = time.perf_counter()
        with self.active():
            self._regroup(start)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Regroup within this block, in which other ranks that regroup other communicators are answered."""
        self.thread, self.is_active = get_ident(), True
        try:
            with answering(self):
                yield
        finally:
            self.is_active = False

    def run_in_helper(self) -> None:
        """Regroup in this thread, while the one that drives the calls regroups another communicator."""
        self.thread, self.is_active = get_ident(), True
        try:
            self._regroup(time.perf_counter())
        finally:
            self.is_active = False

    @property
    def is_active_here(self) -> bool:
        """True within the regrouping of this thread."""
        return self.is_active and self.thread == get_ident()

    @property
    def is_awaited(self) -> bool:
        """True if another rank regroups, and this one does not."""
        return not self.is_active and self.comm.calls.is_open and is_revoked(self.comm.mpi_comm)

    def answer(self) -> None:
        """Regroup if another rank does, in the thread that drives the calls."""
        if self.is_awaited:
            try:
                self._run()
            except Exception as error:  # noqa: BLE001 - the communicator's calls end by it
                self.comm.ending.abort(error)

    def _is_death(self, error: BaseException) -> bool:
        mpi_comm = self.comm.mpi_comm
        if reports_death(error, mpi_comm):
            return True
        # a rank that an exception ends sends a notice, which arrives before MPI's notice of its death
        missing = self.comm.missing
        return (
            isinstance(error, CollectiveTimeout)
            and missing.n_left > 0
            and await_death(mpi_comm, lambda: missing.another_failed)
        )

    def _regroup(self, start: float) -> None:
        comm, before = self.comm, self.members
        self.on_death()
        here, old, found = comm.here, comm.mpi_comm, _Tries(comm, self._unrepeated)
        self._damages = []
        while True:
            for one in (old, *(part.mpi_comm for part in comm.parts)):
                revoke(one)
            new = self.complete(old.Shrink)
            new.Set_errhandler(MPI.ERRORS_RETURN)
            is_renewed = False
            try:
                self._try(new, found, before)
                is_renewed = True
            except (MPI.Exception, PeerFailure, DamagedMessage) as error:
                if not may_repeat(error, new, self._damages):
                    raise
                revoke(new)  # ranks may wait for messages of this one
            except TopologyError as error:
                raise PeerFailure(f"{here}: {self._lost(before)}, and the survivors cannot go on: {error}") from error
            # Where another rank died meanwhile some survivors have come to the end, and others have not.
            if self.complete(partial(agree, new, is_renewed)):
                break
            old = new
        if found.has_failure:
            self._on_error()
        if found.damage:
            raise comm.ending.abort(DamagedMessage(f"while the survivors regrouped: {found.damage}"))
        lost = self._lost(before)
        if found.is_closing:
            _log.warning("%s: %s while the ranks closed the communicator", here, lost)
            self._end_closing(found.again, lost)
            return
        self.count += 1
        self._unrepeated = dict.fromkeys(self._unrepeated, lost)
        self._begin_again(found.again, lost)
        if len(self.members) < len(before):
            _log.warning(
                "%s, %s before: %s; %d of %d ranks go on after %.0f ms, %s",
                comm.here, here, lost, comm.size, len(before), 1e3 * (time.perf_counter() - start),
                _describe_residuals(found.ages, before, comm.size),
            )  # fmt: skip

    def _try(self, new: MPI.Comm, found: _Tries, before: tuple[int, ...]) -> None:
        """Settle the calls in flight and renew the group among the survivors; they may die meanwhile."""
        if found.saved is None:
            found.users = self._named_users()
        reports = self._settle(new, found)
        found.has_failure = any(one.has_failure for one in reports)
        found.damage = next((one.damage for one in reports if one.damage), "")
        if found.saved is None:
            found.again = self._drop()
            found.saved = _saved(found.users)
        survivors = tuple(MPI.Group.Translate_ranks(new.Get_group(), None, found.group))
        self.members = tuple(before[rank] for rank in survivors)
        found.is_closing = any(one.is_closed for one in reports)  # others have left close() already
        if not (found.is_closing or found.damage):
            self.comm.renew(new, survivors, found.layouts)
            found.ages = self._renew_users(found.saved, reports, found.layouts[0].rank, survivors)

    def _end_closing(self, again: Iterable[Call], lost: str) -> None:
        """Leave close(), as other survivors have: no group is made."""
        calls = self.comm.calls
        calls.enter(State.CLOSING, f"{lost} while the ranks closed it")
        calls.failure = calls.closed()
        for call in again:
            call.steps = _raise(calls.failure)

    def _renew_users(
        self,
        saved: Iterable[SavedUser],
        reports: Collection[_Report],
        rank: int,
        survivors: tuple[int, ...],
    ) -> list[Mapping[int, int | None]]:
        comm, n_joined = self.comm, min(one.joined for one in reports)
        if n_joined < max(one.joined for one in reports):  # users that restart cannot make their nodes alone
            for node_of in sorted({one for report in reports for one in report.layouts}):
                comm.nodes_of(NodeLayout(node_of, rank).of_ranks(survivors, comm.rank))
        return self.renew_users(saved, names_in_all(one.users for one in reports), n_joined, survivors)

    def meet(self) -> None:
        """Regroup though no rank has died, together with ranks that are still in the last call and may have found one.

        Collective, with no call in flight.
        """
        self._meets = True
        try:
            self._run()
        finally:
            self._meets = False

    def say_farewell(self) -> Farewell | None:
        """Answer ranks that are still in close() from now on, and free the communicator once all have left it.

        Returns
        -------
        Farewell or None
            The thread that does so; None: MPI was started without MPI_THREAD_MULTIPLE, or the ranks are threads, and
            the communicator stays.
        """
        comm = self.comm
        if not is_supported(comm.mpi_comm):
            return None
        report = _Report(self._begun, [], [], False, False, [], self.n_joined, [], is_closed=True)
        unused = [one.mpi_comm for one in (*comm.parts, comm) if not one.ending.keeps_requests]
        unused = [carrier(one) for one in unused]  # without checksums and emulated links
        native = carrier(comm.mpi_comm)
        farewell = Farewell(native, comm.calls.next_tag(), report, comm.timeout, unused, comm.options.checked)
        farewell.start()
        return farewell

    # Newcomers -------------------------------------------------------------------------------------------------------

    def _named_users(self) -> list[tuple[str, int, Survivor]]:
        """Return the long-lived users with their names and places, in the order of joining.

        Of users with equal descriptions a rank may keep more than others: their names count from the last one.
        """
        joined = sorted(((place, view(user)) for user, (place, view) in self._users.items()), key=itemgetter(0))
        found, seen = [], Counter[str]()
        for place, one in reversed(joined):
            name = one.describe()
            found.append((f"{name}, {seen[name]} of its kind later" if seen[name] else name, place, one))
            seen[name] += 1
        return found[::-1]

    def save_users(self) -> list[SavedUser]:
        """Return the long-lived users in the order of joining, with their states."""
        return _saved(self._named_users())

    def renew_users(
        self, saved: Iterable[SavedUser], common: Collection[str], n_joined: int, survivors: tuple[int, ...]
    ) -> list[Mapping[int, int | None]]:
        """Continue from `save_users` on the communicator as it is now; collective. Returns the ages of residuals.

        `common` has the names of users that all ranks have, and `n_joined` how many all ranks have made. One that a
        rank has yet to make restarts: no step of it has ended. One that a rank has dropped, and another one keeps
        alive, is left as it is: no more calls of it can be made.
        """
        ages = []
        for one in saved:
            if one.name in common:
                ages.append(one.user.renew(one.state, survivors))
            elif one.place > n_joined:
                one.user.restart(one.state)
        return ages

    def counters(self) -> tuple[int, int, int]:
        """Return the counters that a newcomer takes over by `adopt`."""
        return self._begun, self.count, self.n_joined

    def adopt(self, counters: tuple[int, int, int]) -> None:
        """Take over the counters of a member."""
        self._begun, self.count, self.n_joined = counters

    def _lost(self, before: Iterable[int]) -> str:
        lost = sorted(set(before) - set(self.members))
        return f"{list_ranks(lost)} died" if lost else "a rank died"

    def _ranks_lost(self, call: Call, lost: str) -> RanksLost:
        text = f"{self.comm.here}: {lost} during {call.name()}; the survivors can make the call again"
        return RanksLost(text, self.members)

    def _settle(self, new: MPI.Comm, found: _Tries) -> list[_Report]:
        """Settle the calls in flight that a survivor has ended; return the reports of all survivors."""
        ordered = self.comm.calls.ordered
        open_calls = [call for call in ordered if not is_settled(call)]
        unsettled = [call.standing.sequence for call in open_calls]
        unrepeated = [call.standing.sequence for call in open_calls if call.remake is None]
        # a rank that came by `meet` may have died since another one received its report
        mine = _Report(
            self._begun, unsettled, unrepeated, found.has_failure, self._meets or self.has_met,
            [name for name, *_ in found.users], self.n_joined, found.of_nodes, damage="".join(self._damages[:1]),
        )  # fmt: skip
        reports: list[_Report] = gather_objects(self.comm.options.checked(new), mine, self.comm.timeout)
        self.has_met |= any(one.meets for one in reports)
        for call in ordered:
            place = call.standing.sequence
            if any(place <= one.begun and place not in one.unsettled for one in reports):
                call.standing.is_settled = True
        lost = {place: "" for one in reports for place in one.unrepeated if place > self._begun}
        self._unrepeated = {**found.unrepeated, **lost}
        return reports

    def _drop(self) -> list[Call]:
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

    def _begin_again(self, again: Iterable[Call], lost: str) -> None:
        comm = self.comm
        for call in again:
            call.number, call.owners, call.mismatch, call.arrival = 0, (), "", None
            call.moved()
            if not call.is_pairwise:
                call.tag = comm.calls.next_tag()
            comm.calls.history.begin(call)
            if call.remake is None:
                call.steps = _raise(self._ranks_lost(call, lost))
            else:
                call.steps = self._settling(call, call.remake())
                comm.enter(call)


def _saved(users: Iterable[tuple[str, int, Survivor]]) -> list[SavedUser]:
    return [SavedUser(place, name, user, user.save()) for name, place, user in users]


def names_in_all(everyones: Iterable[Collection[str]]) -> set[str]:
    """Return the names that all ranks have."""
    return set.intersection(*map(set, everyones))


def _describe_residuals(ages: Iterable[Mapping[int, int | None]], before: Sequence[int], size: int) -> str:
    """Return the fate of the residuals of dead ranks, for the warning; `before` has their first numbers."""
    oldest: dict[int, int | None] = {}
    for one in ages:
        for rank, age in one.items():
            known = oldest.get(rank, 0)
            oldest[rank] = None if age is None or known is None else max(age, known)
    if not oldest:
        return f"without {len(before) - size}/{len(before)} of what each residual had pending"
    kept = {before[rank]: age for rank, age in sorted(oldest.items())}
    return ", ".join(_describe_residual(rank, age) for rank, age in kept.items())


def _describe_residual(rank: int, age: int | None) -> str:
    if age is None:
        return f"without the residual of rank {rank}"
    return f"with the residual of rank {rank}" + (f" of {age} step{'s'[: age != 1]} before" if age else "")


class _Report(NamedTuple):
    """Calls of a rank that regroups, by their places in the order of all ranks."""

    begun: int  # the last one
    unsettled: list[int]
    unrepeated: list[int]  # those of the unsettled ones that raise RanksLost
    has_failure: bool
    meets: bool
    users: list[str]  # names of the long-lived ones
    joined: int  # number of long-lived users that the rank has made
    layouts: list[tuple[int, ...]]  # for which the rank has communicators of nodes
    is_closed: bool = False  # the rank has left close()
    damage: str = ""  # text of a damaged message in an earlier try


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
        call.steps = _raise(error)


def _raise(error: BaseException) -> Steps:
    raise error
    yield False
