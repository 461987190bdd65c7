r"""Star all-reduce, the parameter server: all ranks send to one, which merges in rank order and sends the result back.

Four ranks, root 0::

    1   2   3        per chunk   1 -> 0, then 2 -> 0, then 3 -> 0      1 rank in each message, merged into 1, 2, 3
     \  |  /                     0 -> 1, 0 -> 2, 0 -> 3                4 ranks, overwriting
        0

Rounds 2; bytes sent: the root M - 1 times the vector, every other rank once. The root receives one chunk while it
returns the one before, so its link carries both directions at once.

Reference: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI (2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from collectives.schedules.plan import Plan, TopologyError, Transfer, steps_by_time


@dataclass(frozen=True, slots=True)
class Star:
    """Parameter server.

    Parameters
    ----------
    root : int
        The rank that merges. It starts from its own contribution and adds the others in rank order.
    segments : int
        Chunks of the vector that follow each other to the root and back.

    Raises
    ------
    TopologyError
        ``segments`` is below 1, or ``root`` negative.
    """

    name: ClassVar[str] = "star"
    root: int = 0
    segments: int = 8

    def __post_init__(self) -> None:
        if self.segments < 1 or self.root < 0:
            raise TopologyError(
                f"a star needs at least 1 segment and a root of 0 or more, not {self.segments} and {self.root}"
            )

    def plan(self, rank: int, size: int) -> Plan:
        """Rank ``rank``'s part among ``size`` ranks; raises TopologyError where the root is not one of them."""
        if self.root >= size:
            raise TopologyError(f"the star's root is rank {self.root}, but there are only {size} ranks")
        leaves = [leaf for leaf in range(size) if leaf != self.root]
        # What this rank takes part in: its place in the order of leaves, the peer, and what the peer's message meets.
        if rank == self.root:
            parts = [(i, leaf, i + 1) for i, leaf in enumerate(leaves)]
        else:
            parts = [(rank - (rank > self.root), self.root, 0)]
        up: list[tuple[int, Transfer]] = []
        down: list[tuple[int, Transfer]] = []
        for j in range(self.segments):
            chunk, start = range(j, j + 1), j * len(leaves)
            up += [(start + i, Transfer(peer, chunk, 1, held_weight)) for i, peer, held_weight in parts]
            down += [(start + len(leaves) + i, Transfer(peer, chunk, size)) for i, peer, _ in parts]
        sends, recvs = (down, up) if rank == self.root else (up, down)
        return Plan(rank, size, self.segments, steps_by_time(sends, recvs))
