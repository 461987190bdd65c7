"""Newcomers: ranks that wait from the beginning of the job, and take the places of dead ones between two steps.

All ranks of the job are in a communicator of MPI, the pool. It has the members, which train, and the spares, which
wait in `admit` and look at the pool. When the members agree that a rank is missing, they revoke the pool: every spare
notices it. All make a pool of the living ranks and exchange their roles. Members and newcomers then have a communicator
in common, over which a member sends its state. In the end all ranks of the pool agree that the newcomers have taken it.
If a rank has died meanwhile, all begin again with the ranks that are left.

**Why the members regroup before.** A member may have ended the call in which they agree while another one is still in
it and finds a dead rank. The latter regroups, so the former has to as well: neither may wait in another call of MPI.
"""

from __future__ import annotations

import atexit
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np
from mpi4py import MPI

from collectives.consistency.descriptions import gather_bytes, gather_objects, gather_texts
from collectives.errors import PeerFailure
from collectives.execution.handle import keep_uncompiled
from collectives.quoting import list_ranks, one_line
from collectives.recovery.fault_tolerance import agree, failed_ranks, reports_death, revoke

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator
    from collectives.communicator.nodes import NodeLayout

LOOK_S = 0.01  # between two looks of a spare at the pool, which cost a few microseconds each
_DISMISSAL, _READY = 1, 2  # tags of messages: a member ends a spare; a spare has come to `admit`
_log = logging.getLogger("collectives")

GetState = Callable[[], Any]
SetState = Callable[[Any], object]


class _View(NamedTuple):
    """Report of a rank of the pool."""

    number: int  # rank in the job's first pool
    place: int  # rank among the members; -1: a spare


class Newcomers:
    """Spares of a communicator, and their admission.

    Parameters
    ----------
    comm : Communicator
        Of the members; on a spare, of the spare alone.
    pool : MPI.Comm
        All ranks, the spares last.
    layouts : sequence of NodeLayout
        Nodes and hosts of the pool's ranks.
    n_members : int

    Attributes
    ----------
    is_spare : bool
        This rank waits.
    waiting : int
        Number of spares left.
    """

    def __init__(self, comm: Communicator, pool: MPI.Comm, layouts: Sequence[NodeLayout], n_members: int) -> None:
        self._comm, self._pool, self._layouts = ref(comm), pool, tuple(layouts)
        self._number, self._wanted = pool.rank, n_members
        self.is_spare = pool.rank >= n_members
        self._members, self._spares = list(range(n_members)), list(range(n_members, pool.size))  # ranks of the pool
        self._all_ready, self._n_admitted = False, 0
        here = ref(self)

        def leave() -> None:
            newcomers = here()
            if newcomers is not None:
                newcomers.dismiss()

        self.leave = leave
        atexit.register(leave)

    @property
    def waiting(self) -> int:
        """Number of spares left."""
        return len(self._spares)

    def dismiss(self) -> None:
        """End the spares: no member is going to need them."""
        if self.is_spare or not MPI.Is_initialized() or MPI.Is_finalized():
            return
        for spare in self._spares:
            with suppress(MPI.Exception):
                self._pool.Isend([np.empty(0, np.uint8), 0, MPI.BYTE], spare, _DISMISSAL).Free()
        self._spares = []

    # Members ----------------------------------------------------------------------------------------------------------

    def admit(self, state: GetState, load: Callable[[Any, list[Any]], object], each: GetState, ready: bool) -> int:
        """Admit newcomers if a rank is missing; returns their number. See `Communicator.admit`.

        Parameters
        ----------
        state : callable
            Returns the state that one member sends.
        load : callable
            Takes it on the newcomer, and the list of all members' `each`.
        each : callable
            Returns a state that every member sends.
        ready : bool
            False: this member's state cannot be taken now.
        """
        comm = self._comm()
        assert comm is not None
        regroup = comm.regroup
        assert regroup is not None
        if self.is_spare:
            return self._wait(comm, state, load, each)
        if comm.calls.driver is not None:
            comm.calls.driver.flush()
        regroup.has_met = False
        mine = np.array(
            [comm.size < self._wanted and self._are_ready(), bool(comm.calls.in_flight()) or not ready], np.int64
        )
        is_missing, is_busy = comm.allreduce(mine, "max")
        has_met, regroup.has_met = regroup.has_met, False
        if is_busy or not is_missing:
            return 0
        if not has_met:
            regroup.meet()
            regroup.has_met = False
        return self._assemble(comm, state, load, each)

    def _are_ready(self) -> bool:
        """Return True if there are spares and all have come to `admit`: members must not wait for their imports."""
        if not self._all_ready:
            self._all_ready = all(map(self._is_ready, self._spares))
        return self._all_ready and self.waiting > 0

    def _is_ready(self, spare: int) -> bool:
        try:
            return self._pool.Iprobe(spare, _READY)
        except MPI.Exception:  # it has died, and nobody waits for it
            return True

    # Spares -----------------------------------------------------------------------------------------------------------

    def _wait(
        self, comm: Communicator, state: GetState, load: Callable[[Any, list[Any]], object], each: GetState
    ) -> int:
        """Wait until this rank is admitted; returns the number of ranks admitted with it.

        Raises
        ------
        SystemExit
            The members have ended.
        """
        for member in () if self._all_ready else self._members:
            with suppress(MPI.Exception):  # this member has died
                self._pool.Isend([np.empty(0, np.uint8), 0, MPI.BYTE], member, _READY).Free()
        self._all_ready = True
        while self.is_spare:
            if self._pool.Is_revoked():
                self._assemble(comm, state, load, each)
            elif self._is_dismissed():
                raise SystemExit(0)
            else:
                time.sleep(LOOK_S)
        return self._n_admitted

    def _is_dismissed(self) -> bool:
        if set(self._members) <= set(failed_ranks(self._pool)):
            return True
        for member in self._members:
            with suppress(MPI.Exception):  # this member has died
                if self._pool.Iprobe(member, _DISMISSAL):
                    return True
        return False

    # Both -------------------------------------------------------------------------------------------------------------

    def _assemble(
        self, comm: Communicator, state: GetState, load: Callable[[Any, list[Any]], object], each: GetState
    ) -> int:
        regroup = comm.regroup
        assert regroup is not None
        regroup.is_active = True
        try:
            return self._repeat(comm, state, load, each)
        finally:
            regroup.is_active = False

    def _repeat(
        self, comm: Communicator, state: GetState, load: Callable[[Any, list[Any]], object], each: GetState
    ) -> int:
        regroup = comm.regroup
        assert regroup is not None
        start, here, pool, place = time.perf_counter(), comm.here, self._pool, -1 if self.is_spare else comm.rank
        regroup.on_death()
        saved = None if self.is_spare else regroup.save_users()
        revoke(pool)
        while True:
            pool = regroup.with_survivors(pool.Shrink)
            pool.Set_errhandler(MPI.ERRORS_RETURN)
            views: list[_View] = []
            taken: list[int] = []
            new, problems, is_joined = MPI.COMM_NULL, [""], False
            try:
                views = gather_objects(pool, _View(self._number, place), comm.timeout)
                members = sorted(
                    (rank for rank, one in enumerate(views) if one.place >= 0), key=lambda one: views[one].place
                )
                if not members:
                    raise SystemExit(1)
                spares = [rank for rank, one in enumerate(views) if one.place < 0]
                taken = spares[: max(0, self._wanted - len(members))]
                chosen = [*members, *taken]
                takes_part = pool.rank in chosen
                color, key = (0, chosen.index(pool.rank)) if takes_part else (MPI.UNDEFINED, 0)
                new = regroup.with_survivors(partial(pool.Split, color, key))
                problem = ""
                if takes_part:
                    new.Set_errhandler(MPI.ERRORS_RETURN)
                    content = b""
                    if new.rank == 0:  # a member; another one than before if that has died
                        assert saved is not None
                        users = [(user.describe(), state_of) for user, state_of in saved]
                        counters = comm.shared_counters(), regroup.counters()
                        content = pickle.dumps((state(), each(), users, counters), pickle.HIGHEST_PROTOCOL)
                    elif place >= 0:
                        content = pickle.dumps((None, each(), None, None), pickle.HIGHEST_PROTOCOL)
                    contents = gather_bytes(new, content, comm.timeout)
                    if place < 0 and saved is None:
                        saved, problem = self._take(comm, contents[: len(members)], load)
                problems = gather_texts(pool, problem, comm.timeout)
                if not any(problems):
                    if takes_part:
                        numbers = tuple(views[rank].number for rank in chosen)
                        regroup.members = numbers
                        comm.renew(new, numbers, self._layouts)
                        assert saved is not None
                        regroup.renew_users(saved, tuple(range(len(members))))
                    is_joined = True
            except (MPI.Exception, PeerFailure) as error:
                if not reports_death(error, pool):
                    raise
                revoke(pool)
                if new != MPI.COMM_NULL:
                    revoke(new)
            if regroup.with_survivors(partial(agree, pool, is_joined)):
                break
            if any(problems) and len(problems) == pool.size:
                pool = self._refuse(comm, pool, problems, views)
        self._pool = pool
        is_new = place < 0 and pool.rank in taken
        self._members = [rank for rank, one in enumerate(views) if one.place >= 0 or rank in taken]
        self._spares = [rank for rank in range(pool.size) if rank not in self._members]
        self._n_admitted = len(taken)
        self.is_spare = place < 0 and not is_new
        if not self.is_spare and taken:
            _log.warning(
                "%s, %s before: %s joined; %d ranks go on after %.0f ms", comm.here, here,
                list_ranks([views[rank].number for rank in taken]), comm.size, 1e3 * (time.perf_counter() - start),
            )  # fmt: skip
        return len(taken)

    def _take(
        self, comm: Communicator, contents: Sequence[bytes], load: Callable[[Any, list[Any]], object]
    ) -> tuple[list[tuple[Any, Any]] | None, str]:
        """Take a member's state as a newcomer; returns the users' states, or else the reason for which it cannot."""
        regroup = comm.regroup
        assert regroup is not None
        try:
            state, _, users, (shared, counters) = pickle.loads(contents[0])
            comm.adopt(shared)
            load(state, [pickle.loads(one)[1] for one in contents])
            own = [user for user, _ in regroup.save_users()]
            here, there = [user.describe() for user in own], [text for text, _ in users]
            if here != there:
                pairs = [*zip(here, there, strict=False)]
                differing = next((pair for pair in pairs if pair[0] != pair[1]), (f"{len(here)}", f"{len(there)}"))
                raise ValueError(f"its aggregators differ from the members': {differing[0]} and {differing[1]}")
            saved = [(user, user.enter(peers)) for user, (_, peers) in zip(own, users, strict=True)]
        except Exception as error:  # noqa: BLE001 - of the caller's functions, which raise anything
            return None, f"{one_line(error) or type(error).__name__}"
        comm.adopt(shared)
        regroup.adopt(counters)
        return saved, ""

    def _refuse(self, comm: Communicator, pool: MPI.Comm, problems: Sequence[str], views: Sequence[_View]) -> MPI.Comm:
        """Return a pool without the newcomers that have a problem.

        Raises
        ------
        ValueError
            On these.
        """
        regroup = comm.regroup
        assert regroup is not None
        mine = problems[pool.rank]
        left = regroup.with_survivors(partial(pool.Split, MPI.UNDEFINED if mine else 0, pool.rank))
        if mine:
            raise ValueError(
                f"rank {self._number} of the job cannot join: {mine}; start all ranks with the same program, model, "
                "options and version of mpicomp"
            )
        if not self.is_spare and comm.rank == 0:
            for rank, problem in enumerate(problems):
                if problem:
                    _log.warning(
                        "%s: rank %d of the job cannot join, and the others go on: %s",
                        comm.here, views[rank].number, problem,
                    )  # fmt: skip
        left.Set_errhandler(MPI.ERRORS_RETURN)
        return left


def _nothing() -> None:
    return None


@keep_uncompiled
def admit(comm: Communicator, state: GetState, load: SetState) -> int:
    """Let ranks that wait take the places of dead ones; collective, between two steps, a few microseconds.

    Call it at the beginning of each step. On a rank that waits, see ``Communicator(spares=...)``, it returns once the
    rank has been admitted and `load` has taken a member's state. Aggregators made before, in the same order on all
    ranks, then have the members' counters and shared state, and no pending error. If no member needs the rank any
    more, its program ends there. While calls are in flight nobody is admitted.

    Parameters
    ----------
    state : callable
        Returns the state of a member, which can be pickled: model, step and all else on which the next step depends.
        Called on one member when a rank joins, and on another one if that member dies meanwhile.
    load : callable
        Takes this state on the newcomer.

    Returns
    -------
    int
        Number of ranks that joined. The members have new ranks then: see ``comm.rank`` and ``comm.size``.

    Raises
    ------
    ValueError
        On a newcomer: `load` has raised an error, or its aggregators differ from those of the members, which go on
        without it.
    CollectiveMismatch, CollectiveTimeout, PeerFailure
    SystemExit
        On a rank that waits, once the members have ended.

    Examples
    --------
    >>> import mpicomp
    >>> def train(comm):
    ...     step = 0
    ...     def load(saved):
    ...         nonlocal step
    ...         step = saved
    ...     joined = 0
    ...     while step < 10:
    ...         joined += comm.admit(lambda: step, load)
    ...         step += 1
    ...     return joined
    >>> mpicomp.run_local(2, train)
    [0, 0]
    """
    return admit_each(comm, state, lambda saved, _: load(saved), _nothing)


def admit_each(
    comm: Communicator,
    state: GetState,
    load: Callable[[Any, list[Any]], object],
    each: GetState,
    ready: bool = True,
) -> int:
    """Like `admit`, for states of which every member sends a part; see `Newcomers.admit`."""
    return 0 if comm.newcomers is None else comm.newcomers.admit(state, load, each, ready)
