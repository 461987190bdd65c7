r"""Plans that merge nothing: broadcast and all-gather.

In a broadcast the root's vector replaces the vectors of the other ranks. In a chain a rank passes each chunk on as it
arrives, so that every rank sends the vector once at most::

    0 -> 1 -> 2 -> 3        chunk c makes hop s at time c + s: chunks + M - 2 rounds

A binomial tree takes the fewest rounds, which pays for vectors so short that the number of rounds is the cost::

    time 0:  0 -> 1         time 1:  0 -> 2, 1 -> 3        ceil(log2 M) rounds
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from collectives.schedules.plan import Plan, TopologyError, Transfer, steps_by_time
from collectives.schedules.ring import Index, LockstepExchange, all_gather, lockstep_plan


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Broadcast along a chain, or else along a binomial tree. Its receives overwrite; none merges."""

    name = "broadcast"
    root: int
    chunks: int = 1
    chain: bool = True

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks; raises TopologyError if the root is not among them."""
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


@dataclass(frozen=True, slots=True)
class AllGather:
    """Ring all-gather, planned, traced and timed like an all-reduce: each payload, one chunk, goes round the ring."""

    # M - 1 rounds; a rank sends its own payload and those of M - 2 others, each once
    name = "all-gather"

    def exchanges(self, rank: Index, size: int) -> Iterator[LockstepExchange]:
        """Yield the steps of one rank, or of an array of ranks."""
        after, before = (rank + 1) % size, (rank - 1) % size
        for sent, received in all_gather(rank, size):
            yield LockstepExchange(after, before, sent, received, 1, 1, 0)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        return lockstep_plan(rank, size, size, self.exchanges(rank, size))
