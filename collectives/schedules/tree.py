r"""Tree all-reduce: chunks are reduced up a tree and broadcast down it, many chunks on their way at once.

`Tree`, binomial, four ranks (a parent is its child's number with the lowest set bit cleared)::

        0            per chunk   round 0   1 -> 0 and 3 -> 2      1 rank in each message, merged into 1
       / \                       round 1   2 -> 0                 2 ranks, merged into 2
      2   1                      round 2   0 -> 2                 4 ranks from here on, overwriting
      |                          round 3   0 -> 1 and 2 -> 3
      3

Rounds 2 ceil(log2 M) at most; bytes sent: each rank but 0 the vector once, and again once per child.

`DoubleTree`, four ranks: even chunks use the left tree and odd chunks the right one, and who is inner in one is a leaf
in the other::

          3                  0         per chunk   leaf -> inner, inner -> root, root -> inner, inner -> leaf
          |                  |
          1                  2         (in-order trees over 0 1 2 3 and over 3 2 1 0)
         / \                / \
        0   2              3   1

Rounds at most 2 log2 M; bytes sent per rank at most twice the vector for any M, as little as in a long ring.

Chunk j is reduced over an edge at a time of about j + the edge's height, and broadcast a tree's height later, so early
chunks come down while late ones go up. The paper's colouring of the double tree's edges, by which no rank talks to two
peers at once, is left out: links that queue a message lose nothing without it.

References: R. Rabenseifner, "Optimization of collective reduction operations", ICCS (2004), for the binomial tree;
P. Sanders, J. Speck and J. L. Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35 (2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.schedules.plan import Plan, Transfer, require_segments, steps_by_time


@dataclass(frozen=True, slots=True)
class Tree:
    """Binomial tree rooted at rank 0.

    Parameters
    ----------
    segments : int
        Chunks of the vector that follow each other through the tree.

    Raises
    ------
    TopologyError
        ``segments`` is below 1.

    Examples
    --------
    >>> from collectives import Tree
    >>> from collectives.schedules.verify import all_plans, prove
    >>> prove(all_plans(Tree(segments=1), 8)).rounds
    6
    >>> [send.peer for step in Tree(segments=1).plan(rank=0, size=8).steps for send in step.sends]
    [4, 2, 1]
    """

    name = "tree"
    segments: int = 8

    def __post_init__(self) -> None:
        require_segments("a tree", self.segments)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        height = (size - 1).bit_length()
        level = (rank & -rank).bit_length() - 1 if rank else height
        children = [(bit, rank + (1 << bit)) for bit in range(level) if rank + (1 << bit) < size]
        sends: list[tuple[int, Transfer]] = []
        recvs: list[tuple[int, Transfer]] = []
        for j in range(self.segments):
            chunk = range(j, j + 1)
            down = j + 2 * height - 1
            for bit, child in children:
                recvs.append((j + bit, Transfer(child, chunk, min(1 << bit, size - child), 1 << bit)))
                sends.append((down - bit, Transfer(child, chunk, size)))
            if rank:
                parent = rank - (1 << level)
                sends.append((j + level, Transfer(parent, chunk, min(1 << level, size - rank))))
                recvs.append((down - level, Transfer(parent, chunk, size)))
        return Plan(rank, size, self.segments, steps_by_time(sends, recvs))


@dataclass(frozen=True, slots=True)
class _InOrderTree:
    """Binary search tree over positions 1 to ``size``, of which the odd ones are leaves: one tree of the two."""

    size: int
    second: bool

    @property
    def height(self) -> int:
        return self.size.bit_length() - 1

    # Every rank at an even position of the first tree must sit at an odd one of the second, a leaf. Mirroring does that
    # if the number of ranks is even, turning by one if it is odd.
    def position(self, rank: int) -> int:
        if not self.second:
            return rank + 1
        return (rank - 1) % self.size + 1 if self.size % 2 else self.size - rank

    def rank(self, position: int) -> int:
        if not self.second:
            return position - 1
        return position % self.size if self.size % 2 else self.size - position

    def level(self, position: int) -> int:
        return (position & -position).bit_length() - 1

    def parent(self, position: int) -> int:
        """Return the position of the parent, 0 for the root."""
        width = position & -position
        above = position - width | width << 1
        # Where the parent of the full tree lies beyond the end, the next ancestor before the position takes its place.
        return above if above <= self.size else position - width

    def children(self, position: int) -> list[int]:
        half = (position & -position) >> 1
        before = [position - half] if half else []
        while half and position + half > self.size:
            half >>= 1
        return [*before, position + half] if half else before

    def weight(self, position: int) -> int:
        """Return the number of positions in the subtree."""
        width = position & -position
        return min(self.size, position + width - 1) - (position - width)


@dataclass(frozen=True, slots=True)
class DoubleTree:
    """Two binary trees, each carrying half the chunks; for any number of ranks.

    Parameters
    ----------
    segments : int
        Chunks that follow each other through each tree; twice as many in all.

    Raises
    ------
    TopologyError
        ``segments`` is below 1.

    Examples
    --------
    >>> from collectives import DoubleTree
    >>> from collectives.schedules.verify import all_plans, prove
    >>> cost = prove(all_plans(DoubleTree(), 8))
    >>> max(cost.chunks_sent) / DoubleTree().plan(rank=0, size=8).n_chunks  # vectors that a rank sends
    2.0
    """

    name = "double-tree"
    segments: int = 8

    def __post_init__(self) -> None:
        require_segments("a tree", self.segments)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        sends: list[tuple[int, Transfer]] = []
        recvs: list[tuple[int, Transfer]] = []
        for which in (0, 1):
            tree = _InOrderTree(size, second=which == 1)
            position = tree.position(rank)
            level, parent = tree.level(position), tree.parent(position)
            for k in range(self.segments):
                chunk = range(2 * k + which, 2 * k + which + 1)
                # Two time slots a chunk: a position receives from the child before it in one, from the other child in
                # the other.
                up, down = 2 * k - 2, 2 * k + 4 * tree.height
                held = 1
                for child in tree.children(position):
                    peer, weight, after = tree.rank(child), tree.weight(child), child > position
                    recvs.append((up + 2 * level + after, Transfer(peer, chunk, weight, held)))
                    sends.append((down - 2 * level + after, Transfer(peer, chunk, size)))
                    held += weight
                if parent:
                    peer, above, after = tree.rank(parent), tree.level(parent), position > parent
                    sends.append((up + 2 * above + after, Transfer(peer, chunk, held)))
                    recvs.append((down - 2 * above + after, Transfer(peer, chunk, size)))
        return Plan(rank, size, 2 * self.segments, steps_by_time(sends, recvs))
