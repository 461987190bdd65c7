r"""All-reduces by owners: one rank, or each rank for its part of the vector, merges and sends the result back.

`Star`, the parameter server, four ranks, root 0::

    1   2   3        per chunk   1 -> 0, then 2 -> 0, then 3 -> 0      1 rank in each message, merged into 1, 2, 3
     \  |  /                     0 -> 1, 0 -> 2, 0 -> 3                4 ranks, overwriting
        0

Rounds 2; bytes sent: the root M - 1 times the vector, every other rank once. The root receives one chunk while it
returns the one before, so its link carries both directions at once.

`Direct`, four ranks, chunk c owned by rank c::

    turn 1        0 -> 1 (chunk 1)    1 -> 2 (chunk 2)    2 -> 3 (chunk 3)    3 -> 0 (chunk 0)     1 rank, merged
    turns 2, 3    0 -> 2 (chunk 2)    ...                                                          1 rank, merged
    turns 4 .. 6  0 -> 1 (chunk 0)    1 -> 2 (chunk 1)    ...                                      4 ranks, overwriting

Rounds 2 (M - 1), or 2 where a rank can send to all at once; bytes sent per rank 2 (M - 1)/M of the vector. The owner of
an element merges M - 1 contributions to it, each straight from its rank. Two-pass compression needs such a route: a
shard is decoded and encoded again only once, at its owner.

Reference for the star: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI (2014).
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.schedules.plan import Plan, TopologyError, Transfer, require_segments, steps_by_time


@dataclass(frozen=True, slots=True)
class Star:
    """Parameter server: all ranks send to the root, which merges in rank order and sends the result back.

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

    Examples
    --------
    >>> from collectives import Star
    >>> from collectives.schedules.verify import all_plans, prove
    >>> prove(all_plans(Star(root=1, segments=1), 4)).messages
    (1, 3, 1, 1)
    >>> Star(root=1).server, len(Star(segments=1).plan(rank=3, size=4).steps)
    (1, 2)
    """

    name = "star"
    root: int = 0
    segments: int = 8

    def __post_init__(self) -> None:
        if self.segments < 1 or self.root < 0:
            raise TopologyError(
                f"a star needs at least 1 segment and a root of 0 or more, not {self.segments} and {self.root}"
            )

    @property
    def server(self) -> int:
        """Rank that merges for all others; see `server_of`."""
        return self.root

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks; raises TopologyError if the root is not among them."""
        if self.root >= size:
            raise TopologyError(f"the star's root is rank {self.root}, but there are only {size} ranks")
        leaves = [leaf for leaf in range(size) if leaf != self.root]
        # Per peer: position of the leaf in the timetable, rank, and weight that the root holds when its message comes.
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


@dataclass(frozen=True, slots=True)
class Direct:
    """All-to-all reduce-scatter, then all-to-all all-gather: each rank owns a part of the vector.

    Parameters
    ----------
    segments : int
        Chunks of each rank's part, which follow each other out and back.

    Raises
    ------
    TopologyError
        `segments` is below 1.

    Examples
    --------
    >>> from collectives import Direct
    >>> from collectives.schedules.verify import all_plans, prove
    >>> prove(all_plans(Direct(segments=1), 4)).messages
    (6, 6, 6, 6)
    >>> {send.peer for step in Direct().plan(rank=0, size=4).steps for send in step.sends}
    {1, 2, 3}
    """

    name = "direct"
    segments: int = 4

    def __post_init__(self) -> None:
        require_segments("a direct all-reduce", self.segments)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        sends, recvs = [], []
        for segment in range(self.segments):
            for turn in range(1, size):
                to, source = (rank + turn) % size, (rank - turn) % size
                out = segment * (size - 1) + turn
                back = out + size - 1
                sends += [
                    (out, Transfer(to, self._chunk(to, segment), 1)),
                    (back, Transfer(to, self._chunk(rank, segment), size)),
                ]
                recvs += [
                    (out, Transfer(source, self._chunk(rank, segment), 1, turn)),
                    (back, Transfer(source, self._chunk(source, segment), size)),
                ]
        return Plan(rank, size, size * self.segments, steps_by_time(sends, recvs))

    def _chunk(self, owner: int, segment: int) -> range:
        chunk = owner * self.segments + segment
        return range(chunk, chunk + 1)
