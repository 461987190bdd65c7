"""All-gather as a schedule: every rank's chunk goes round the ring, each rank passing on what it gets.

Four ranks; a piece of rank 0's::

    hop 0: 0 -> 1        hop 1: 1 -> 2        hop 2: 2 -> 3

Rounds M - 1; bytes sent per rank: its own payload and those of M - 2 others, each once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from collectives.schedules.plan import Plan
from collectives.schedules.ring import Exchange, Index, all_gather, lockstep_plan


@dataclass(frozen=True, slots=True)
class AllGather:
    """One payload a rank, each a chunk, from each to all: no all-reduce, but planned, traced and timed like one."""

    name: ClassVar[str] = "all-gather"

    def exchanges(self, rank: Index, size: int) -> Iterator[Exchange]:
        """The steps of one rank, or of an array of ranks."""
        after, before = (rank + 1) % size, (rank - 1) % size
        for sent, received in all_gather(rank, size):
            yield Exchange(after, before, sent, received, 1, 1, 0)

    def plan(self, rank: int, size: int) -> Plan:
        """Rank ``rank``'s part among ``size`` ranks."""
        return lockstep_plan(rank, size, size, self.exchanges(rank, size))
