"""Schedules as data: who sends which chunks to whom, and how many ranks each message speaks for.

A plan is one rank's part of an all-reduce, as a pure function of (rank, size). Rules every plan obeys:

- A vector is cut into ``n_chunks`` chunks. A rank starts out holding its own contribution (weight 1) to each of them.
- All transfers of a step may be in flight at once. A send carries the chunk as it was when the step began, so no chunk
  is both sent and received, nor received twice, in one step.
- A receive with ``held_weight`` 0 overwrites the chunk; otherwise it merges ``weight`` incoming ranks into
  ``held_weight`` held ones.
- For each ordered pair of ranks, the transfers that one sends are, in plan order, those the other receives: the same
  chunks and weight. Both ends take a message at the same point of one common timetable, so a plan neither deadlocks
  when it is run step by step with rendezvous sends nor when it is run as a data flow.

`collectives.schedules.verify.prove` checks a set of plans for all of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Protocol, runtime_checkable


class TopologyError(ValueError):
    """A topology cannot be laid over this number of ranks.

    Examples
    --------
    >>> from collectives import Communicator, Torus
    >>> Communicator(topology=Torus(rows=2))
    Traceback (most recent call last):
        ...
    collectives.schedules.plan.TopologyError: rank 0 of 1: 1 ranks do not fill a torus of 2 x any rows x columns; ...
    """


def require_segments(topology: str, segments: int) -> None:
    """Raise TopologyError unless there is a segment."""
    if segments < 1:
        raise TopologyError(f"{topology} needs at least 1 segment, not {segments}")


class PlanError(ValueError):
    """A plan is malformed, or a set of plans does not compute an all-reduce.

    Examples
    --------
    >>> from collectives import Plan, Ring
    >>> from collectives.schedules.verify import all_plans, prove
    >>> plans = all_plans(Ring(), 4)
    >>> prove([*plans[:3], Plan(3, 4, 4, plans[3].steps[:-1])])
    Traceback (most recent call last):
        ...
    collectives.schedules.plan.PlanError: rank 0 of 4, step 5: deadlock, it waits to receive ...
    """


@dataclass(frozen=True, slots=True)
class Transfer:
    """Message of neighbouring chunks, in ascending order, to or from one peer.

    Parameters
    ----------
    peer : int
        The rank at the other end.
    chunks : range
        Chunk numbers, step 1, not empty.
    weight : int
        How many ranks' contributions each chunk in the message carries.
    held_weight : int
        Receives only: how many ranks' contributions the receiver holds when the message arrives; 0 overwrites.

    Raises
    ------
    PlanError
        `chunks` is empty or has another step, `weight` is below 1, or `held_weight` negative.

    Examples
    --------
    Chunk 2 with the sum of three ranks, to be added to the receiver's own contribution:

    >>> from collectives import Transfer
    >>> Transfer(peer=1, chunks=range(2, 3), weight=3, held_weight=1)
    Transfer(peer=1, chunks=range(2, 3), weight=3, held_weight=1)
    """

    peer: int
    chunks: range
    weight: int
    held_weight: int = 0

    def __post_init__(self) -> None:
        if self.chunks.step != 1 or not self.chunks or self.chunks.start < 0:
            raise PlanError(f"chunks must be a non-empty run of chunk numbers with step 1, not {self.chunks}")
        if self.weight < 1 or self.held_weight < 0:
            raise PlanError(
                f"a message carries at least one rank: weight {self.weight}, held_weight {self.held_weight}"
            )


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop


@dataclass(frozen=True, slots=True)
class Step:
    """Transfers that may all be in flight at once.

    Parameters
    ----------
    sends, recvs : tuple of Transfer
        One of them may be empty.

    Raises
    ------
    PlanError
        There is no transfer, a send has a `held_weight`, or a received chunk is sent or received again.

    Examples
    --------
    >>> from collectives import Ring
    >>> step = Ring().plan(rank=0, size=4).steps[0]
    >>> step.sends[0].peer, step.recvs[0].peer
    (1, 3)
    """

    sends: tuple[Transfer, ...]
    recvs: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        if not self.sends and not self.recvs:
            raise PlanError("a step needs at least one transfer")
        for send in self.sends:
            if send.held_weight:
                raise PlanError(f"a send to rank {send.peer} merges nothing, yet its held_weight is {send.held_weight}")
        for send, recv in product(self.sends, self.recvs):
            if _overlap(send.chunks, recv.chunks):
                raise PlanError(f"chunks {send.chunks} are sent while chunks {recv.chunks} are received in one step")
        for one, other in combinations(self.recvs, 2):
            if _overlap(one.chunks, other.chunks):
                raise PlanError(f"chunks {one.chunks} and {other.chunks} overlap and are received in one step")


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's part of an all-reduce.

    Parameters
    ----------
    rank, size : int
        The rank that the plan belongs to, and the number of ranks.
    n_chunks : int
        Number of chunks that the vector is cut into; the same on all ranks.
    steps : tuple of Step
        In order; empty if ``size`` is 1.

    Raises
    ------
    PlanError
        A peer, a chunk or a weight is out of range for ``rank``, ``size`` and ``n_chunks``.

    Examples
    --------
    >>> from collectives import Star
    >>> plan = Star(segments=1).plan(rank=2, size=3)
    >>> [("send", send.peer) for step in plan.steps for send in step.sends]
    [('send', 0)]
    """

    rank: int
    size: int
    n_chunks: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise PlanError(f"rank {self.rank} is not one of {self.size} ranks")
        if self.n_chunks < 1:
            raise PlanError(f"a plan needs at least one chunk, not {self.n_chunks}")
        for index, step in enumerate(self.steps):
            for transfer in (*step.sends, *step.recvs):
                problem = self._problem(transfer)
                if problem:
                    raise PlanError(f"rank {self.rank} of {self.size}, step {index}: {problem}")

    def _problem(self, transfer: Transfer) -> str:
        if not 0 <= transfer.peer < self.size or transfer.peer == self.rank:
            return f"rank {transfer.peer} cannot be its peer"
        if transfer.chunks.stop > self.n_chunks:
            return f"chunks {transfer.chunks} go beyond the {self.n_chunks} there are"
        if transfer.weight + transfer.held_weight > self.size:
            return f"weight {transfer.weight} + {transfer.held_weight} is more than the {self.size} ranks there are"
        return ""


@runtime_checkable
class Topology(Protocol):
    """Maker of plans. Implementations are frozen dataclasses: printable, comparable, hashable.

    An attribute ``server`` is optional; see `server_of`. Topologies with `collectives.schedules.ring.Lockstep` are
    simulated for all ranks at once. `mpicomp help extending` has a complete one.

    Examples
    --------
    >>> from collectives import Ring, Topology
    >>> ring = Ring()
    >>> isinstance(ring, Topology), ring.name, ring.plan(rank=0, size=4).n_chunks
    (True, 'ring', 4)
    """

    @property
    def name(self) -> str:
        """Name on a command line, such as ``"ring"``."""
        ...

    def plan(self, rank: int, size: int) -> Plan:
        """Return the part of rank ``rank`` among ``size`` ranks; the same whenever it is called.

        Raises
        ------
        TopologyError
            The topology does not fit this number of ranks.
        """
        ...


def server_of(topology: Topology | str) -> int | None:
    """Return the rank that merges for all others, or None if the ranks share the work."""
    # in its plans every other rank sends its contribution to the server, and receives the result from it
    return getattr(topology, "server", None)


def steps_by_time(sends: Iterable[tuple[int, Transfer]], recvs: Iterable[tuple[int, Transfer]]) -> tuple[Step, ...]:
    """Group one rank's entries in a common timetable into steps.

    Where both ends of every message name the same time, the ranks can walk the timetable together, so the steps cannot
    deadlock. Times at which this rank has nothing to do are dropped; within a time the given order is kept.

    Parameters
    ----------
    sends, recvs : iterable of (int, Transfer)
        Times and transfers.

    Returns
    -------
    tuple of Step

    Raises
    ------
    PlanError
        Transfers of one time cannot be in flight at once.

    Examples
    --------
    Rank 1 of 3 adds the vector of rank 2, sends the sum to rank 0, and passes the result on:

    >>> from collectives import Transfer
    >>> from collectives.schedules.plan import steps_by_time
    >>> chunk = range(1)
    >>> sends = [(1, Transfer(0, chunk, 2)), (3, Transfer(2, chunk, 3))]
    >>> recvs = [(0, Transfer(2, chunk, 1, held_weight=1)), (2, Transfer(0, chunk, 3))]
    >>> steps = steps_by_time(sends, recvs)
    >>> [len(step.sends) for step in steps]
    [0, 1, 0, 1]
    """
    slots: dict[int, tuple[list[Transfer], list[Transfer]]] = {}
    for side, entries in enumerate((sends, recvs)):
        for time, transfer in entries:
            slots.setdefault(time, ([], []))[side].append(transfer)
    return tuple(Step(tuple(slots[time][0]), tuple(slots[time][1])) for time in sorted(slots))
