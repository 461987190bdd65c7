"""Losses of ranks, as a group meets them: MPI's reports of deaths, the errors that name the dead, and who goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from mpi4py import MPI

from collectives.errors import PeerFailure
from collectives.exit_without_mpi import expect_deaths, fail_at_end, leave_without_finalizing
from collectives.process_end import meet_at_end, say_farewell
from collectives.recovery.answers import watch
from collectives.recovery.arguments import validate_on_failure, validate_spares
from collectives.recovery.fault_tolerance import (
    ADVICE,
    LONGEST_NOTICE_S,
    describe_failed,
    failed_ranks,
    is_tolerant,
    is_tolerant_job,
    reporting_deaths,
    reports_death,
    revoke,
)
from collectives.recovery.half_made import guard_half_made
from collectives.recovery.newcomers import Newcomers, newcomers_of
from collectives.recovery.regroup import Regroup
from collectives.recovery.witness import call_witness

if TYPE_CHECKING:
    from collectives.group.group import Group
    from collectives.group.opening import Duplicate

_MAKING = "while the ranks made a communicator"


class Losses:
    """Losses of ranks that one group meets, from its making on.

    Parameters
    ----------
    regroups : bool
        The ranks that are left go on.
    spares : int
        Ranks that wait for a death.

    Attributes
    ----------
    compared : tuple of int and bool
        The parameters, which are equal on all ranks.
    end_calls : bool
        The death of any rank of the job ends the calls of this group.
    """

    def __init__(self, regroups: bool, spares: int) -> None:
        self.regroups, self.spares, self.end_calls = regroups, spares, False
        self.compared = spares, regroups
        if is_tolerant_job():
            guard_half_made()
        self._before = failed_ranks(MPI.COMM_WORLD)  # which end no call of this group
        self._regroup: Regroup | None = None

    def reported(self, mpi_comm: MPI.Comm) -> AbstractContextManager[None]:
        """Return a context manager that turns MPI's errors into a `PeerFailure` while the ranks make the group."""
        return reporting_deaths(mpi_comm, _MAKING, self._before)

    def members_of(self, pool: Duplicate) -> Duplicate:
        """Return the part of all ranks that makes calls with this one; a rank that waits is alone."""
        if not self.spares:
            return pool
        numbers = self._numbers(pool.mpi_comm)
        made = pool.mpi_comm.Split(numbers[0], pool.mpi_comm.rank)
        made.Set_errhandler(MPI.ERRORS_RETURN)
        layout, hosts = (one.of_ranks(numbers, made.rank) for one in (pool.layout, pool.hosts))
        return pool._replace(mpi_comm=made, layout=layout, hosts=hosts)

    def _numbers(self, pool: MPI.Comm) -> range:
        n_members = pool.size - self.spares
        return range(n_members) if pool.rank < n_members else range(pool.rank, pool.rank + 1)

    def recovery_of(self, group: Group, pool: Duplicate) -> Regroup | None:
        """Return the object that goes on with a group's calls among `pool`; None: a death ends them."""
        mpi_comm = pool.mpi_comm
        if not self.regroups or mpi_comm.size == 1:
            self.end_calls = is_tolerant(group.missing.comm)
            return None
        made = self._regroup = Regroup(group, leave_without_finalizing, fail_at_end, self._numbers(mpi_comm))
        if self.spares:
            made.newcomers = Newcomers(group, mpi_comm, (pool.layout, pool.hosts), mpi_comm.size - self.spares)
        expect_deaths()
        return made

    def join_job(self, group: Group, pool: MPI.Comm) -> None:
        """Let the ranks of a group of the whole job meet at its end, which a death makes a failure; collective."""
        if pool.size != MPI.COMM_WORLD.size or not (is_tolerant(pool) or pool.size > 1):
            return
        if is_tolerant(pool):
            meet_at_end(newcomers_of(group))
        others = (pool,) if self.spares else ()
        with self.reported(pool), group.exchange(*others):
            call_witness(group.options.checked(pool), group.arrival_timeout)

    def watch(self) -> None:
        """Answer other ranks that regroup, once the group is made."""
        if self._regroup is not None:
            watch(self._regroup)

    def release(self) -> None:
        """Free the communicator of a group that goes on after deaths, once all ranks have left it."""
        if self._regroup is not None:
            say_farewell(self._regroup)

    def can_happen_in(self, mpi_comm: MPI.Comm) -> bool:
        """Return True if ranks of this communicator outlive others."""
        return is_tolerant(mpi_comm)

    def of(self, mpi_comm: MPI.Comm) -> list[int]:
        """Return the ranks of a communicator that have died."""
        return failed_ranks(mpi_comm)

    def revoke(self, mpi_comm: MPI.Comm) -> None:
        """Let all requests of a communicator fail, on all of its ranks."""
        revoke(mpi_comm)

    def raise_if_any(self, mpi_comm: MPI.Comm, here: str) -> None:
        """Raise PeerFailure if a rank has died since the group was made."""
        if dead := describe_failed(mpi_comm, but=self._before):
            raise PeerFailure(f"{here}: {dead} died{ADVICE}") from MPI.Exception(MPI.ERR_PROC_FAILED)

    def failure(
        self, error: MPI.Exception | PeerFailure, mpi_comm: MPI.Comm, here: str, family: Iterable[MPI.Comm]
    ) -> PeerFailure:
        """Return the error to raise for one of MPI; after a death the other ranks' calls of the `family` fail too."""
        text = str(error) if isinstance(error, PeerFailure) else f"{here}: MPI says {error}"
        # A rank that waits may have found the death in MPI's list before any error of MPI.
        is_death = is_tolerant(mpi_comm) and (reports_death(error, mpi_comm) or bool(failed_ranks(mpi_comm)))
        if is_death:
            for one in family:
                revoke(one)
        if is_death and "died" not in text:
            dead = describe_failed(mpi_comm, LONGEST_NOTICE_S, self._before) or "a rank"
            text = f"{text.partition(':')[0]}: {dead} died{ADVICE}"
        found = PeerFailure(text)
        found.__cause__ = error
        return found


def validate_losses(on_failure: str, spares: object, parent: MPI.Comm, others: Mapping[str, object]) -> Losses:
    """Validate `on_failure` and `spares` of a `Communicator`, and return the handler of its lost ranks.

    `parent` is its communicator of MPI; `others` are arguments that cannot be combined with ranks that wait.

    Raises
    ------
    TypeError, ValueError
        An argument cannot be used.
    """
    regroups = validate_on_failure(on_failure, parent)
    return Losses(regroups, validate_spares(spares, on_failure, parent, others))
