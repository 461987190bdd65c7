r"""Broadcast as a plan: what the root has, in place of what the others had.

A chain passes every chunk on as it comes, each rank sending the vector once, whatever the number of ranks::

    0 -> 1 -> 2 -> 3        chunk c makes hop s at time c + s: chunks + M - 2 rounds

A binomial tree takes the fewest rounds, for what is so short that rounds are all it costs::

    time 0:  0 -> 1         time 1:  0 -> 2, 1 -> 3        ceil(log2 M) rounds
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectives.schedules.plan import Plan, TopologyError, Transfer, steps_by_time


@dataclass(frozen=True, slots=True)
class Broadcast:
    """From the root to all others, along a chain or else a binomial tree. Its plans overwrite and merge nothing."""

    name: ClassVar[str] = "broadcast"
    root: int
    chunks: int = 1
    chain: bool = True

    def plan(self, rank: int, size: int) -> Plan:
        """Rank ``rank``'s part among ``size`` ranks; raises TopologyError where the root is none of them."""
        if not 0 <= self.root < size:
            raise TopologyError(f"rank {self.root}, which is to send to all others, is not one of {size} ranks")
        sends: list[tuple[int, Transfer]] = []
        recvs: list[tuple[int, Transfer]] = []
        place = (rank - self.root) % size

        def transfer(other: int, chunks: range) -> Transfer:
            return Transfer((self.root + other) % size, chunks, size)

        if self.chain:
            for chunk in range(self.chunks):
                one = range(chunk, chunk + 1)
                if place:
                    recvs.append((chunk + place - 1, transfer(place - 1, one)))
                if place < size - 1:
                    sends.append((chunk + place, transfer(place + 1, one)))
        else:
            whole = range(self.chunks)
            for time in range((size - 1).bit_length()):
                distance = 1 << time
                if place < distance and place + distance < size:
                    sends.append((time, transfer(place + distance, whole)))
                elif distance <= place < 2 * distance:
                    recvs.append((time, transfer(place - distance, whole)))
        return Plan(rank, size, self.chunks, steps_by_time(sends, recvs))
