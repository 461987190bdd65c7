"""Regroup: after the death of a rank the survivors make a new group, and end or repeat the calls in flight.

An error of MPI on one rank reaches all: it revokes the communicator, whose requests then fail on all ranks. So all of
them regroup (`regrouping`), and decide which calls end by the commit rule (`commit_rule`).

With several communicators, ranks that wait elsewhere answer: `collectives.recovery.answers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from mpi4py import MPI

from collectives.errors import CollectiveTimeout, DamagedMessage
from collectives.execution.call import Call, Steps
from collectives.progress.polling import SLEEP_S
from collectives.progress.thread import is_supported
from collectives.recovery.answers import answering
from collectives.recovery.commit_rule import CallReport, CommitRule
from collectives.recovery.farewell import Farewell
from collectives.recovery.fault_tolerance import await_death, is_revoked, look, reports_death, with_survivors
from collectives.recovery.regrouping import Regrouping, SurvivorReport
from collectives.recovery.survivors import Survivor, Survivors
from collectives.states import State
from collectives.transports import carrier

if TYPE_CHECKING:
    from collectives.group.group import Group
    from collectives.recovery.newcomers import Newcomers

_Made = TypeVar("_Made")


class Regroup(CommitRule):
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
    count : int
        How often the ranks have become others: survivors have regrouped, or newcomers have joined them. Equal on all.
    is_active : bool
        The survivors regroup now: calls of the communicator are not possible, calls of MPI are.
    thread : int
        Number of the thread that regroups, or has regrouped last.
    meets, has_met : bool
        This rank regroups by `meet`; set when the survivors regroup, where one of them has come by it.
    survivors : Survivors
        Long-lived users.
    newcomers : Newcomers or None
        Ranks that wait for a death.
    """

    def __init__(
        self, comm: Group, on_death: Callable[[], None], on_error: Callable[[], None], members: Iterable[int]
    ) -> None:
        super().__init__(comm)
        self.on_death, self.on_error = on_death, on_error
        self.members, self.count = tuple(members), 0
        self.meets = self.has_met = self.is_active = False
        self.thread = 0
        self.survivors = Survivors()
        self.newcomers: Newcomers | None = None

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
        self.survivors.join(user, view)

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
        with self.active():
            self._regroup()

    @contextmanager
    def active(self, helps: bool = False) -> Iterator[None]:
        """Regroup within this block, in which other ranks that regroup other communicators are answered.

        A thread that `helps` answers none: the one that it helps does.
        """
        self.thread, self.is_active = get_ident(), True
        try:
            with nullcontext() if helps else answering(self):
                yield
        finally:
            self.is_active = False

    def run_in_helper(self) -> None:
        """Regroup in this thread, while the one that drives the calls regroups another communicator."""
        with self.active(helps=True):
            self._regroup()

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

    def _regroup(self) -> None:
        self.on_death()
        Regrouping(self).run()

    def meet(self) -> None:
        """Regroup though no rank has died, together with ranks that are still in the last call and may have found one.

        Collective, with no call in flight.
        """
        self.meets = True
        try:
            self._run()
        finally:
            self.meets = False

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
        calls, n_joined = CallReport(self.n_begun, [], []), self.survivors.n_joined
        report = SurvivorReport(calls, False, False, [], n_joined, [], is_closed=True)
        # without checksums and emulated links; all parts are closed by now, and those that users closed are freed
        made = (part for nodes in comm.levels.values() for part in (nodes.local, nodes.across))
        unused = [carrier(one.mpi_comm) for one in (*made, comm) if not one.ending.keeps_requests]
        unused = [one for one in unused if one != MPI.COMM_NULL]
        native = carrier(comm.mpi_comm)
        farewell = Farewell(native, comm.calls.next_tag(), report, comm.timeout, unused, comm.options.checked)
        farewell.start()
        return farewell

    def counters(self) -> tuple[int, int, int]:
        """Return the counters that a newcomer takes over by `adopt`."""
        return self.n_begun, self.count, self.survivors.n_joined

    def adopt(self, counters: tuple[int, int, int]) -> None:
        """Take over the counters of a member."""
        self.n_begun, self.count, self.survivors.n_joined = counters
