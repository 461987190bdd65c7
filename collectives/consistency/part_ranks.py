"""Ranks of a part of a communicator, compared with those that it is to have: MPI exchanges colours by itself."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from collectives.errors import DamagedMessage
from collectives.quoting import list_ranks
from collectives.transports import carrier, has_processes


def ranks_in(comm: Any, part: Any) -> list[int]:
    """Return the rank in a communicator of each rank of a part, negative for a rank of others; without messages."""
    whole, some = carrier(comm), carrier(part)
    if not has_processes(whole):
        return [whole.members.index(one) if one in whole.members else MPI.UNDEFINED for one in some.members]
    groups = some.Get_group(), whole.Get_group()
    found = MPI.Group.Translate_ranks(groups[0], None, groups[1])
    for group in groups:
        group.Free()
    return list(found)


def require_ranks(comm: Any, part: Any, expected: list[int]) -> None:
    """Raise DamagedMessage unless MPI has made a part of the expected ranks, which it exchanges by itself."""
    if (found := ranks_in(comm, part)) != expected:
        raise DamagedMessage(
            f"rank {comm.rank} of {comm.size}: MPI has made a group of {list_ranks(found)} and not of "
            f"{list_ranks(expected)}, as if its own message was damaged: test memory, network adapters and cables"
        )
