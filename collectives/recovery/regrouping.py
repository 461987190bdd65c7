"""One regrouping: the survivors of a death make a new group, again if another rank dies meanwhile.

MPI makes a communicator of the survivors. They exchange which calls they have begun and ended, decide by the commit
rule, and renew all that depends on the group: ranks, nodes, routes, tags, and the parts of aggregators. In the end they
agree that all of them have done so; if another rank has died meanwhile, all begin again from the same states.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mpi4py import MPI

from collectives.consistency.descriptions import gather_objects
from collectives.errors import DamagedMessage, PeerFailure
from collectives.execution.call import Call
from collectives.quoting import list_ranks
from collectives.recovery.commit_rule import CallReport, raising
from collectives.recovery.fault_tolerance import agree, may_repeat, revoke
from collectives.recovery.survivors import SavedUser, Survivor, describe_residuals, names_in_all, renew_all, save_all
from collectives.schedules.plan import TopologyError
from collectives.states import State

if TYPE_CHECKING:
    from collectives.recovery.regroup import Regroup

_log = logging.getLogger("collectives")


class SurvivorReport(NamedTuple):
    """Report of a rank that regroups."""

    calls: CallReport
    has_failure: bool
    meets: bool
    users: list[str]  # names of the long-lived ones
    joined: int  # number of long-lived users that the rank has made
    layouts: list[tuple[int, ...]]  # for which the rank has communicators of nodes
    is_closed: bool = False  # the rank has left close()
    damage: str = ""  # text of a damaged message in an earlier try


class Regrouping:
    """State of one regrouping over all tries, until no rank dies meanwhile."""

    def __init__(self, regroup: Regroup) -> None:
        comm = regroup.comm
        self._regroup, self._comm, self._start = regroup, comm, time.perf_counter()
        self._here, self._before = comm.here, regroup.members
        self._group, self._layouts = comm.mpi_comm.Get_group(), (comm.layout, comm.hosts)
        self._of_nodes = [one.node_of for one in comm.levels]
        self._has_failure, self._unrepeated = comm.missing.another_failed, regroup.unrepeated
        self._users: list[tuple[str, int, Survivor]] = []
        self._saved: list[SavedUser] | None = None
        self._again: list[Call] = []  # calls in flight that are made again
        self._ages: list[Mapping[int, int | None]] = []  # of residuals
        self._damages: list[str] = []  # texts of damaged messages that this rank has received
        self._damage, self._is_closing = "", False

    def run(self) -> None:
        """Regroup; raises as `Regroup.recover` does."""
        regroup, comm = self._regroup, self._comm
        old = comm.mpi_comm
        while True:
            for one in (old, *(part.mpi_comm for part in comm.parts)):
                revoke(one)
            new = regroup.complete(old.Shrink)
            new.Set_errhandler(MPI.ERRORS_RETURN)
            is_renewed = False
            try:
                self._try(new)
                is_renewed = True
            except (MPI.Exception, PeerFailure, DamagedMessage) as error:
                if not may_repeat(error, new, self._damages):
                    raise
                revoke(new)  # ranks may wait for messages of this one
            except TopologyError as error:
                raise PeerFailure(f"{self._here}: {self._lost()}, and the survivors cannot go on: {error}") from error
            # Where another rank died meanwhile some survivors have come to the end, and others have not.
            if regroup.complete(partial(agree, new, is_renewed)):
                break
            old = new
        if self._has_failure:
            regroup.on_error()
        if self._damage:
            raise comm.ending.abort(DamagedMessage(f"while the survivors regrouped: {self._damage}"))
        if self._is_closing:
            _log.warning("%s: %s while the ranks closed the communicator", self._here, self._lost())
            self._end_closing()
        else:
            self._go_on()

    def _try(self, new: MPI.Comm) -> None:
        """Settle the calls in flight and renew the group among the survivors; they may die meanwhile."""
        regroup = self._regroup
        if self._saved is None:
            self._users = regroup.survivors.named()
        reports = self._exchange(new)
        self._has_failure = any(one.has_failure for one in reports)
        self._damage = next((one.damage for one in reports if one.damage), "")
        if self._saved is None:
            self._again = regroup.drop()
            self._saved = save_all(self._users)
        survivors = tuple(MPI.Group.Translate_ranks(new.Get_group(), None, self._group))
        regroup.members = tuple(self._before[rank] for rank in survivors)
        self._is_closing = any(one.is_closed for one in reports)  # others have left close() already
        if not (self._is_closing or self._damage):
            self._comm.renew(new, survivors, self._layouts)
            self._ages = self._renew_users(self._saved, reports, survivors)

    def _exchange(self, new: MPI.Comm) -> list[SurvivorReport]:
        """Return the reports of all survivors, by which the calls in flight are settled."""
        regroup, comm = self._regroup, self._comm
        # a rank that came by `meet` may have died since another one received its report
        mine = SurvivorReport(
            regroup.report(), self._has_failure, regroup.meets or regroup.has_met, [name for name, *_ in self._users],
            regroup.survivors.n_joined, self._of_nodes, damage="".join(self._damages[:1]),
        )  # fmt: skip
        reports: list[SurvivorReport] = gather_objects(comm.options.checked(new), mine, comm.timeout)
        regroup.has_met |= any(one.meets for one in reports)
        regroup.settle([one.calls for one in reports], self._unrepeated)
        return reports

    def _renew_users(
        self, saved: list[SavedUser], reports: Sequence[SurvivorReport], survivors: tuple[int, ...]
    ) -> list[Mapping[int, int | None]]:
        comm, n_joined = self._comm, min(one.joined for one in reports)
        if n_joined < max(one.joined for one in reports):  # users that restart cannot make their nodes alone
            for node_of in sorted({one for report in reports for one in report.layouts}):
                comm.nodes_of(replace(self._layouts[0], node_of=node_of).of_ranks(survivors, comm.rank))
        return renew_all(saved, names_in_all(one.users for one in reports), n_joined, survivors)

    def _lost(self) -> str:
        lost = sorted(set(self._before) - set(self._regroup.members))
        return f"{list_ranks(lost)} died" if lost else "a rank died"

    def _end_closing(self) -> None:
        """Leave close(), as other survivors have: no group is made."""
        calls = self._comm.calls
        calls.enter(State.CLOSING, f"{self._lost()} while the ranks closed it")
        calls.failure = calls.closed()
        for call in self._again:
            call.steps = raising(calls.failure)

    def _go_on(self) -> None:
        """Begin the calls again in the new group."""
        regroup, comm, before, lost = self._regroup, self._comm, self._before, self._lost()
        regroup.count += 1
        regroup.begin_again(self._again, lost)
        if len(regroup.members) < len(before):
            _log.warning(
                "%s, %s before: %s; %d of %d ranks go on after %.0f ms, %s",
                comm.here, self._here, lost, comm.size, len(before), 1e3 * (time.perf_counter() - self._start),
                describe_residuals(self._ages, before, comm.size),
            )  # fmt: skip
