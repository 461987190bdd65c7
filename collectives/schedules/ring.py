"""Ring all-reduce: reduce-scatter, then all-gather, each hop to the right-hand neighbour.

Four ranks 0 -> 1 -> 2 -> 3 -> 0, four chunks a b c d; rank 0 ends up owning a, rank 1 b, and so on::

            rank 0          rank 1          rank 2          rank 3
    step 0  sends d         sends a         sends b         sends c        1 rank in each message, merged into 1
    step 1  sends c         sends d         sends a         sends b        2 ranks
    step 2  sends b         sends c         sends d         sends a        3 ranks; each owner's chunk is complete
    step 3  sends a         sends b         sends c         sends d        all 4 from here on, overwriting
    step 4  sends d         sends a         sends b         sends c
    step 5  sends c         sends d         sends a         sends b

Rounds 2 (M - 1); bytes sent per rank 2 (M - 1)/M of the vector, the least possible.

With ``segments`` S > 1 the vector is cut into S parts, each with a ring of its own, and the rings take turns: while
a chunk of one part is being merged, a chunk of the next part is on the wire.

Reference: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from collectives.schedules.plan import Plan, Step, Transfer, require_segments

Index: TypeAlias = Any
"""An int, or an integer array with one entry a rank: the formulas below hold for both."""


class LockstepExchange(NamedTuple):
    """One step of all ranks: each sends a run of ``length`` chunks and receives another run of this length."""

    send_to: Index
    recv_from: Index
    sent: Index  # first chunk of the run that goes out
    received: Index  # first chunk of the run that comes in
    length: int
    weight: int
    held_weight: int


@runtime_checkable
class Lockstep(Protocol):
    """Topology in whose steps all ranks send and receive equally many chunks of equal weight."""

    # one pass over arrays then stands for all ranks at once
    def exchanges(self, rank: Index, size: int) -> Iterator[LockstepExchange]:
        """Yield the steps of rank ``rank``, or of each rank in an array of ranks."""
        ...


def reduce_scatter(position: Index, length: int) -> Iterator[tuple[Index, Index, int]]:
    """Yield (block sent, block received, positions summed in each) of the reducing half of a ring of ``length``."""
    # position p ends up with the complete block p
    for hop in range(length - 1):
        yield (position - 1 - hop) % length, (position - 2 - hop) % length, hop + 1


def all_gather(position: Index, length: int) -> Iterator[tuple[Index, Index]]:
    """Yield (block sent, block received) of the gathering half of a ring; position p starts with block p."""
    for hop in range(length - 1):
        yield (position - hop) % length, (position - 1 - hop) % length


def lockstep_plan(rank: int, size: int, n_chunks: int, exchanges: Iterable[LockstepExchange]) -> Plan:
    """Convert one rank's exchanges to a plan."""
    return Plan(
        rank,
        size,
        n_chunks,
        tuple(
            Step(
                (Transfer(e.send_to, range(e.sent, e.sent + e.length), e.weight),),
                (Transfer(e.recv_from, range(e.received, e.received + e.length), e.weight, e.held_weight),),
            )
            for e in exchanges
        ),
    )


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring, or segmented ring.

    Parameters
    ----------
    segments : int
        Parts of the vector that travel as interleaved rings; 1 is the plain ring.

    Raises
    ------
    TopologyError
        ``segments`` is below 1.

    Examples
    --------
    >>> import mpicomp
    >>> from collectives import Ring
    >>> mpicomp.run_local(4, lambda comm: comm.allreduce(1.5), topology=Ring(segments=2))
    [6.0, 6.0, 6.0, 6.0]
    >>> len(Ring().plan(rank=0, size=4).steps)
    6
    >>> Ring(segments=2).name
    'segmented-ring'
    """

    segments: int = 1

    def __post_init__(self) -> None:
        require_segments("a ring", self.segments)

    @property
    def name(self) -> str:
        """``"ring"``, or ``"segmented-ring"`` if there is more than one segment."""
        return "ring" if self.segments == 1 else "segmented-ring"

    def exchanges(self, rank: Index, size: int) -> Iterator[LockstepExchange]:
        """Yield the steps of `rank`, an int or an array of ranks, among `size` ranks.

        Segment s has the chunks from s * size to (s + 1) * size.
        """
        after, before = (rank + 1) % size, (rank - 1) % size
        for sent, received, weight in reduce_scatter(rank, size):
            for first in range(0, self.segments * size, size):
                yield LockstepExchange(after, before, first + sent, first + received, 1, weight, 1)
        for sent, received in all_gather(rank, size):
            for first in range(0, self.segments * size, size):
                yield LockstepExchange(after, before, first + sent, first + received, 1, size, 0)

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks."""
        return lockstep_plan(rank, size, self.segments * size, self.exchanges(rank, size))
