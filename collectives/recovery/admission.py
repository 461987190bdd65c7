"""One admission of newcomers: tried in ever smaller pools until no rank dies in it and all newcomers can join."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from collectives.annotations import Bytes
from collectives.consistency.descriptions import gather_objects, gather_texts
from collectives.consistency.part_ranks import require_ranks
from collectives.errors import DamagedMessage, PeerFailure
from collectives.quoting import one_line
from collectives.recovery.fault_tolerance import agree, may_repeat, revoke
from collectives.recovery.state_transfer import pack, transfer, unpack
from collectives.recovery.survivors import SavedUser, names_in_all, renew_all

if TYPE_CHECKING:
    from collectives.group.group import Group
    from collectives.nodes.layout import NodeLayout
    from collectives.recovery.regroup import Regroup

_log = logging.getLogger("collectives")

GetState = Callable[[], Any]


class StateTransfer(NamedTuple):
    """The functions by which a newcomer gets the state on which the next step depends.

    Parameters
    ----------
    state : callable
        Returns the state that one member sends.
    load : callable
        Takes it on the newcomer, and the list of all members' `each`.
    each : callable
        Returns a state that every member sends.
    is_ready : bool
        False: this member's state cannot be taken now.
    """

    state: GetState
    load: Callable[[Any, list[Any]], object]
    each: GetState
    is_ready: bool = True


class PoolReport(NamedTuple):
    """Report of a rank of the pool."""

    number: int  # rank in the job's first pool
    place: int  # rank among the members; -1: a spare
    users: list[str]  # names of a member's long-lived ones
    n_joined: int  # of those that it has made
    damage: str = ""  # text of a damaged message in an earlier try


class Admission:
    """One admission, tried in ever smaller pools until no rank dies in it and all newcomers can join.

    Parameters
    ----------
    comm : Group
    regroup : Regroup
    transfer : StateTransfer
    mine : PoolReport
    saved : list of SavedUser or None
        This rank's users; None: a spare has no state yet.

    Attributes
    ----------
    reports : list of PoolReport
        Of all ranks of the pool.
    members, taken, left : list of int
        Ranks of the pool: the members as they were, the newcomers, and the spares that go on waiting.
    damage : str
        Text of the one that a rank has received in an earlier try, for which nobody joins; or "".
    """

    def __init__(
        self, comm: Group, regroup: Regroup, transfer: StateTransfer, mine: PoolReport, saved: list[SavedUser] | None
    ) -> None:
        self._comm, self._regroup, self._transfer = comm, regroup, transfer
        self._mine, self._saved = mine, saved
        self._damages: list[str] = []  # texts of the damaged messages that this rank has received
        self._forget()

    def _forget(self) -> None:
        self.reports: list[PoolReport] = []
        self.members: list[int] = []
        self.taken: list[int] = []
        self.left: list[int] = []
        self._new: MPI.Comm = MPI.COMM_NULL  # of members and newcomers
        self._problems: list[str] = []  # why newcomers cannot join, or "", once all ranks of the pool have exchanged it
        self.damage = ""

    def run(self, pool: MPI.Comm, n_wanted: int, layouts: Sequence[NodeLayout]) -> MPI.Comm:
        """Admit newcomers until there are `n_wanted` members; returns the pool in which all have ended this."""
        regroup = self._regroup
        while True:
            pool = regroup.complete(pool.Shrink)
            pool.Set_errhandler(MPI.ERRORS_RETURN)
            has_ended = False
            try:
                self._try(pool, n_wanted, layouts)
                has_ended = not any(self._problems)
            except (MPI.Exception, PeerFailure, DamagedMessage) as error:
                if not may_repeat(error, pool, self._damages):
                    raise
                revoke(pool)
                if self._new != MPI.COMM_NULL:
                    revoke(self._new)
            if regroup.complete(partial(agree, pool, has_ended)):
                return pool
            # A rank may have died while the problems were exchanged, so that some ranks have not received them.
            if regroup.complete(partial(agree, pool, any(self._problems))):
                pool = self._refuse(pool)

    def _try(self, pool: MPI.Comm, n_wanted: int, layouts: Sequence[NodeLayout]) -> None:
        """Try it with all ranks of this pool.

        Raises
        ------
        SystemExit
            No member is left.
        MPI.Exception, PeerFailure
            A rank has died.
        DamagedMessage
        """
        self._forget()
        checked = self._comm.options.checked(pool)
        mine = self._mine._replace(damage="".join(self._damages[:1]))
        self.reports = gather_objects(checked, mine, self._comm.timeout)
        self.damage = next((one.damage for one in self.reports if one.damage), "")
        if self.damage:
            return
        ranks = range(pool.size)
        self.members = sorted(
            (rank for rank in ranks if self.reports[rank].place >= 0), key=lambda rank: self.reports[rank].place
        )
        if not self.members:
            sys.exit(1)  # whose status is recorded, unlike that of a bare SystemExit
        spares = [rank for rank in ranks if rank not in self.members]
        n_taken = max(0, n_wanted - len(self.members))
        self.taken, self.left = spares[:n_taken], spares[n_taken:]
        chosen = self.members + self.taken
        takes_part = pool.rank in chosen
        color, key = (0, chosen.index(pool.rank)) if takes_part else (MPI.UNDEFINED, 0)
        self._new = self._regroup.complete(partial(pool.Split, color, key))
        if takes_part:
            self._new.Set_errhandler(MPI.ERRORS_RETURN)
            require_ranks(pool, self._new, chosen)
        problem = ""
        if self.taken:
            frames = pack(self._content(is_first=pool.rank == self.members[0])) if pool.rank in self.members else []
            states = transfer(checked, self.members, self.taken, frames, self._comm.timeout, self._comm.arrival_timeout)
            if states:
                problem = self._take(states)
                del states  # the memory of all that the newcomer has copied
        self._problems = gather_texts(checked, problem, self._comm.arrival_timeout)  # `load` may take long
        if takes_part and not any(self._problems):
            assert self._saved is not None
            numbers = tuple(self.reports[rank].number for rank in chosen)
            self._regroup.members = numbers
            self._comm.renew(self._new, numbers, layouts)
            n_joined = min(self.reports[rank].n_joined for rank in self.members)
            renew_all(self._saved, self._users_of_all(), n_joined, tuple(range(len(self.members))))

    def _users_of_all(self) -> set[str]:
        """Return the names of users that all members have."""
        return names_in_all(self.reports[rank].users for rank in self.members)

    def _content(self, is_first: bool) -> tuple[Any, Any]:
        """Return the objects that this member sends: the first one its whole state, the others their parts."""
        whole = None
        if is_first:  # another member than before if that has died
            assert self._saved is not None
            common = self._users_of_all()
            users = [(one.name, one.state) for one in self._saved if one.name in common]
            whole = self._transfer.state(), users, _shared(self._comm), self._regroup.counters()
        return whole, self._transfer.each()

    def _take(self, states: Sequence[Sequence[Bytes]]) -> str:
        """Take the members' states as a newcomer; returns the reason for which it cannot, or ""."""
        comm, regroup = self._comm, self._regroup
        try:
            sent = [unpack(frames) for frames in states]
            (state, users, shared, counters), _ = sent[0]
            _adopt(comm, shared)
            self._transfer.load(state, [each for _, each in sent])
            own = regroup.survivors.save()
            here, there = [one.name for one in own], [name for name, _ in users]
            if here != there:
                pairs = [*zip(here, there, strict=False)]
                differing = next((pair for pair in pairs if pair[0] != pair[1]), (f"{len(here)}", f"{len(there)}"))
                raise ValueError(f"its aggregators differ from the members': {differing[0]} and {differing[1]}")
            self._saved = [
                one._replace(state=one.user.enter(peers)) for one, (_, peers) in zip(own, users, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - of the caller's functions, which raise anything
            return f"{one_line(error) or type(error).__name__}"
        _adopt(comm, shared)
        regroup.adopt(counters)
        return ""

    def _refuse(self, pool: MPI.Comm) -> MPI.Comm:
        """Return a pool without the newcomers that have a problem.

        Raises
        ------
        ValueError
            On these.
        """
        mine = self._problems[pool.rank]
        left = self._regroup.complete(partial(pool.Split, MPI.UNDEFINED if mine else 0, pool.rank))
        if mine:
            raise ValueError(
                f"rank {self._mine.number} of the job cannot join: {mine}; start all ranks with the same program, "
                "model, options and version of mpicomp"
            )
        if pool.rank == self.members[0]:
            for rank, problem in enumerate(self._problems):
                if problem:
                    _log.warning(
                        "%s: rank %d of the job cannot join, and the others go on: %s",
                        self._comm.here, self.reports[rank].number, problem,
                    )  # fmt: skip
        left.Set_errhandler(MPI.ERRORS_RETURN)
        return left


def _shared(comm: Group) -> dict[str, Any]:
    """Return names and numbers that are equal on all members, which a newcomer adopts."""
    routes = comm.routes
    return {"key": comm.key, "eager": routes.eager_bytes, "tag": comm.users.last_tag, "version": routes.version}


def _adopt(comm: Group, shared: dict[str, Any]) -> None:
    """Take over the names and numbers of a member.

    Raises
    ------
    ValueError
        The member has another version of the wire format.
    """
    version = comm.routes.version
    if shared["version"] != version:
        raise ValueError(f"wire format {version} here, and {shared['version']} on the members")
    comm.key, comm.routes.eager_bytes = shared["key"], shared["eager"]
