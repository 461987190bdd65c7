"""Parts of a group that regroups: all ranks have one, or none, though ranks die while they make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveMismatch, PeerFailure, RanksLost
from collectives.execution.call import Call
from collectives.execution.traffic import Traffic
from collectives.recovery.fault_tolerance import reports_death, revoke

if TYPE_CHECKING:
    from collectives.group.group import Group

_Part = TypeVar("_Part", bound="Group")


def make_on_all(
    comm: Group, size: int, make: Callable[[], _Part | None], abandon: Callable[[_Part, str], None]
) -> _Part | None:
    """Return the part that `make` returns, on all of `size` ranks or on none; collective.

    `abandon` gives up a part that not all ranks have. A rank that dies meanwhile fails `make` on some of the others
    only, and these would go on without the rest.

    Raises
    ------
    RanksLost
        On all survivors.
    PeerFailure
        A rank failed, and none died.
    TypeError, ValueError, CollectiveMismatch
        Of `make`, if all ranks are alive.
    """
    regroup = comm.recovery
    if regroup is None or regroup.is_active_here:
        return make()
    part, count = None, regroup.count
    problem: Exception | None = None
    try:
        part = make()
    except (TypeError, ValueError, CollectiveMismatch) as error:
        problem = error
    except Exception as error:
        if not (isinstance(error, PeerFailure) or reports_death(error, comm.mpi_comm)):
            comm.ending.give_up(error)  # of this rank alone
            raise
        problem = error
        if regroup.count == count:  # others wait for this rank
            revoke(comm.mpi_comm)
    has_failed = problem is not None and not isinstance(problem, TypeError | ValueError | CollectiveMismatch)
    alive, made = count_ranks(comm, not has_failed)
    if made < size and part is not None:
        abandon(part, "another rank failed while the ranks made it")
    if alive < size:
        text = f"{comm.here}: a rank died during split(); the survivors can make the call again"
        raise RanksLost(text, comm.members) from problem
    if problem is not None:
        raise problem
    if made < size:
        raise PeerFailure(f"{comm.here}: another rank failed during split(), though none died: see its error")
    return part


def count_ranks(comm: Group, is_made: bool) -> tuple[int, int]:
    """Return the number of living ranks, and how many of them have made their part: equal on all, if ranks die too."""
    text, values = "the end of split()", np.array([1, is_made])
    call, sums = Call(comm, lambda: text), values.copy()
    call.is_compared = True
    call.remake = lambda: comm.check(call, fingerprint(text), Traffic(), values, sums)
    comm.run(call, call.remake())
    alive, made = sums.tolist()
    return alive, made
