"""Newcomers: ranks that wait from the beginning of the job, and take the places of dead ones between two steps.

All ranks of the job are in a communicator of MPI, the pool. It has the members, which train, and the spares, which
wait in `admit` and look at the pool. When the members agree that a rank is missing, they revoke the pool: every spare
notices it. All make a pool of the living ranks and exchange their roles. Members and newcomers make a communicator of
their own, and a member sends its state to the newcomers. In the end all ranks of the pool agree that the newcomers have
taken it. If a rank has died meanwhile, all begin again with the ranks that are left.

**Why the members regroup before.** A member may have ended the call in which they agree while another one is still in
it and finds a dead rank. The latter regroups, so the former has to as well: neither may wait in another call of MPI.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
from mpi4py import MPI

from collectives.errors import DamagedMessage
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import list_ranks
from collectives.recovery.admission import Admission, GetState, PoolReport, StateTransfer
from collectives.recovery.fault_tolerance import failed_ranks, revoke

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator
    from collectives.group.group import Group
    from collectives.nodes.layout import NodeLayout
    from collectives.recovery.regroup import Regroup

LOOK_S = 0.01  # between two looks of any spare of a host at the pool: each takes its core from a member for 0.1 ms
_DISMISSAL, _READY = 1, 2  # tags of messages: a member ends a spare; a spare has come to `admit`
_log = logging.getLogger("collectives")


class Newcomers:
    """Spares of a communicator, and their admission.

    Parameters
    ----------
    comm : Group
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
    n_wanted : int
        Number of members as long as spares are left.
    """

    def __init__(self, comm: Group, pool: MPI.Comm, layouts: Sequence[NodeLayout], n_members: int) -> None:
        self._comm, self._pool, self._layouts = ref(comm), pool, tuple(layouts)
        self._number, self.n_wanted = pool.rank, n_members
        self.is_spare = pool.rank >= n_members
        self._members, self._spares = list(range(n_members)), list(range(n_members, pool.size))  # ranks of the pool
        self._all_ready, self._n_admitted = False, 0
        self._n_looks, self._look_s = 0, self._look_interval(self._spares)

    @property
    def local_rank(self) -> int:
        """Number of this rank among those that its host had at the start, with those that wait."""
        return self._layouts[1].local_rank

    @property
    def has_members(self) -> bool:
        """Return False if all members have died."""
        return not set(self._members) <= set(failed_ranks(self._pool))

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

    def admit(self, transfer: StateTransfer, allreduce: Callable[..., Any]) -> int:
        """Admit newcomers if a rank is missing; returns their number. See `Communicator.admit`."""
        comm, regroup = self._parts()
        if self.is_spare:
            return self._wait(transfer)
        if comm.calls.driver is not None:
            comm.calls.driver.flush()
        regroup.has_met = False
        could_join = comm.size < self.n_wanted and self._are_ready()
        cannot_now = bool(comm.calls.in_flight()) or not transfer.is_ready
        is_missing, is_busy = allreduce(np.array([could_join, cannot_now], np.int64), "max")
        has_met, regroup.has_met = regroup.has_met, False
        if is_busy or not is_missing:
            return 0
        if not has_met:
            regroup.meet()
            regroup.has_met = False
        return self._assemble(transfer)

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

    def _wait(self, transfer: StateTransfer) -> int:
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
            is_dismissed = self._is_dismissed()  # before the other look: MPI makes progress in it
            if self._pool.Is_revoked():
                self._assemble(transfer)
            elif is_dismissed:
                raise SystemExit(0)
            else:
                time.sleep(self._look_s)
        return self._n_admitted

    def _look_interval(self, spares: Sequence[int]) -> float:
        """Return the seconds between two looks of this spare, for spares with these ranks in the job."""
        host_of = self._layouts[1].node_of
        return LOOK_S * max(1, sum(host_of[spare] == host_of[self._number] for spare in spares))

    def _is_dismissed(self) -> bool:
        """Return True if the members have ended; looks at one of them, since each sends a message."""
        member = self._members[self._n_looks % len(self._members)]
        self._n_looks += 1
        try:
            return self._pool.Iprobe(member, _DISMISSAL)
        except MPI.Exception:  # this member has died
            if not self.has_members:
                sys.exit(1)
            return False

    # Both -------------------------------------------------------------------------------------------------------------

    def _parts(self) -> tuple[Group, Regroup]:
        comm = self._comm()
        assert comm is not None
        regroup: Any = comm.recovery
        return comm, regroup

    def _assemble(self, transfer: StateTransfer) -> int:
        """Admit newcomers with all living ranks of the pool, again after each death; returns the newcomers' number."""
        comm, regroup = self._parts()
        with regroup.active():
            start, here = time.perf_counter(), comm.here
            regroup.on_death()
            saved = None if self.is_spare else regroup.survivors.save()
            names, place = [one.name for one in saved or ()], -1 if self.is_spare else comm.rank
            mine = PoolReport(self._number, place, names, regroup.survivors.n_joined)
            admission = Admission(comm, regroup, transfer, mine, saved)
            revoke(self._pool)
            self._pool = admission.run(self._pool, self.n_wanted, self._layouts)
        if admission.damage:
            raise comm.ending.abort(DamagedMessage(f"admit(), with the ranks that wait: {admission.damage}"))
        self._members, self._spares = admission.members + admission.taken, admission.left
        self._look_s = self._look_interval([admission.reports[rank].number for rank in admission.left])
        self._n_admitted = len(admission.taken)
        self.is_spare = self._pool.rank in self._spares
        if not self.is_spare:
            regroup.count += 1
        if not self.is_spare and admission.taken:
            _log.warning(
                "%s, %s before: %s joined; %d ranks go on after %.0f ms", comm.here, here,
                list_ranks([admission.reports[rank].number for rank in admission.taken]), comm.size,
                1e3 * (time.perf_counter() - start),
            )  # fmt: skip
        return self._n_admitted


def newcomers_of(comm: Group) -> Newcomers | None:
    """Return the ranks of a group's job that wait for others to die; None: no rank waits."""
    recovery: Any = comm.recovery
    return None if recovery is None else recovery.newcomers


def is_waiting(comm: Group) -> bool:
    """Return True if this rank waits for others to die."""
    newcomers = newcomers_of(comm)
    return newcomers is not None and newcomers.is_spare


def n_ranks_of_steps(comm: Group) -> int:
    """Return the number of ranks that make steps; one that waits has a communicator of itself alone."""
    newcomers = newcomers_of(comm)
    return newcomers.n_wanted if newcomers is not None and newcomers.is_spare else comm.size


@keep_uncompiled
def admit(comm: Communicator, state: GetState, load: Callable[[Any], object]) -> int:
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
    return admit_by(comm, StateTransfer(state, lambda saved, _: load(saved), lambda: None))


def admit_by(comm: Communicator, transfer: StateTransfer) -> int:
    """Like `admit`, for states of which every member sends a part."""
    newcomers = newcomers_of(comm)
    return 0 if newcomers is None else newcomers.admit(transfer, comm.allreduce)
