"""Nodes of a communicator: which ranks share memory, and communicators within a node and between nodes."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.progress.polling import wait
from collectives.quoting import list_ranks

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator


class NodeLabel(int):
    """Number of this rank's node, in the group that was split or over an emulated link; replaces `ranks_per_node`."""


@dataclass(frozen=True)
class NodeLayout:
    """Node of each rank.

    Parameters
    ----------
    node_of : tuple of int
        Node of each rank, in rank order; nodes are numbered in the order of their lowest ranks.
    rank : int
        This rank.
    """

    node_of: tuple[int, ...]
    rank: int

    @classmethod
    def of_keys(cls, keys: Sequence[object], rank: int) -> NodeLayout:
        """Return the layout of ranks whose nodes have these keys."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(key, len(numbers)) for key in keys), rank)

    @classmethod
    def of_parts(cls, comm: Communicator, part: Communicator) -> NodeLayout:
        """Return the layout whose nodes are the parts of `comm` that each rank passes; collective.

        Raises
        ------
        ValueError
            A part has other ranks than those that pass it, or has them in another order; on every rank.
        """
        members = part.allgather(np.array([comm.rank], np.int64)).reshape(-1)
        mine = np.array([members[0], part.rank, part.size, comm.rank], np.int64)
        everyones = comm.allgather(mine).reshape(comm.size, -1)
        layout = cls.of_keys(everyones[:, 0].tolist(), comm.rank)
        for rank, (_, place, size, _) in enumerate(everyones.tolist()):
            if place != layout.places[rank] or size != layout.sizes[layout.node_of[rank]]:
                raise ValueError(
                    f"rank {rank} is number {place} of the {size} ranks of its part, and number {layout.places[rank]} "
                    f"of the {layout.sizes[layout.node_of[rank]]} ranks of this communicator there: split it in parts "
                    "by split(color), which keeps the order of ranks"
                )
        return layout

    def of_survivors(self, survivors: Sequence[int], rank: int) -> NodeLayout:
        """Return the layout of the ranks that had these numbers; `rank` is this rank's number among them."""
        return NodeLayout.of_keys([self.node_of[one] for one in survivors], rank)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Ranks of this rank's node, in order."""
        return tuple(rank for rank, node in enumerate(self.node_of) if node == self.node)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks of each node."""
        return tuple(np.bincount(self.node_of).tolist())

    @cached_property
    def ranks_of_each(self) -> int | None:
        """Ranks of each node, if all nodes have equally many and these follow each other; else None."""
        size, n_ranks = self.sizes[0], len(self.node_of)
        in_order = self.node_of == tuple(rank // size for rank in range(n_ranks))
        return size if in_order and n_ranks % size == 0 else None

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.node_of[self.rank]

    @property
    def local_rank(self) -> int:
        """Number of this rank among those of its node."""
        return self.places[self.rank]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Number of each rank among those of its node."""
        return tuple(self.node_of[:rank].count(node) for rank, node in enumerate(self.node_of))

    @property
    def counterparts(self) -> tuple[int, ...]:
        """Rank with this rank's local number on each node that has one, in the order of nodes."""
        nodes = [[rank for rank, node in enumerate(self.node_of) if node == one] for one in range(len(self.sizes))]
        return tuple(ranks[self.local_rank] for ranks in nodes if len(ranks) > self.local_rank)

    @property
    def n_shards(self) -> int:
        """Ranks of the smallest node."""
        return min(self.sizes)


def find_layouts(
    mpi_comm: MPI.Comm,
    host: MPI.Comm,
    ranks_per_node: int | None,
    timeout_s: float,
    checksums: bool = False,
    spares: int = 0,
    regroups: bool = False,
) -> tuple[NodeLayout, NodeLayout, str]:
    """Return the layouts of nodes and of hosts of a communicator, whose ranks on this host are `host`; collective.

    The last value is a name of the communicator that no other one has, in this job or another, equal on all ranks.

    All ranks are there.

    Raises
    ------
    ValueError
        The ranks pass different `ranks_per_node`, `checksums`, `spares` or `on_failure`; on every rank.
    """
    first = np.array([host.rank == 0 and mpi_comm.rank], np.int64)
    waiting = f"rank {mpi_comm.rank} of {mpi_comm.size}: not all ranks of this node make a communicator"
    wait(host.Ibcast(first, 0), timeout_s, lambda: waiting)
    if isinstance(ranks_per_node, NodeLabel):
        part, given = int(ranks_per_node), 0
    else:
        part, given = (0, 0) if ranks_per_node is None else (host.rank // ranks_per_node, ranks_per_node)
    mine = np.array([first[0], part, given, checksums, secrets.randbits(62), spares, regroups], np.int64)
    everyones = np.empty((mpi_comm.size, mine.size), np.int64)
    waiting = f"rank {mpi_comm.rank} of {mpi_comm.size}: not all ranks make a communicator"
    wait(mpi_comm.Iallgather(mine, everyones), timeout_s, lambda: waiting)
    others = np.flatnonzero(everyones[:, 2] != everyones[0, 2]).tolist()
    if others:
        here, there = (int(everyones[rank, 2]) or None for rank in (0, others[0]))
        raise ValueError(
            f"ranks_per_node is {here} on rank 0 and {there} on {list_ranks(others)}: pass the same on all ranks"
        )
    others = np.flatnonzero(everyones[:, 3] != everyones[0, 3]).tolist()
    if others:
        first_one, other = (bool(everyones[rank, 3]) for rank in (0, others[0]))
        raise ValueError(
            f"checksums is {first_one} on rank 0 and {other} on {list_ranks(others)}: pass the same on all ranks"
        )
    others = np.flatnonzero(everyones[:, 5] != everyones[0, 5]).tolist()
    if others:
        first_count, count = (int(everyones[rank, 5]) for rank in (0, others[0]))
        raise ValueError(
            f"spares is {first_count} on rank 0 and {count} on {list_ranks(others)}: pass the same on all ranks"
        )
    others = np.flatnonzero(everyones[:, 6] != everyones[0, 6]).tolist()
    if others:
        first_kind, kind = (("raise", "regroup")[everyones[rank, 6]] for rank in (0, others[0]))
        raise ValueError(
            f"on_failure is {first_kind!r} on rank 0 and {kind!r} on {list_ranks(others)}: pass the same on all ranks"
        )
    nodes, hosts = [tuple(row) for row in everyones[:, :2].tolist()], everyones[:, 0].tolist()
    key = f"{everyones[0, 4]:016x}"
    return NodeLayout.of_keys(nodes, mpi_comm.rank), NodeLayout.of_keys(hosts, mpi_comm.rank), key


def members_of(mpi_comm: MPI.Comm) -> tuple[int, ...]:
    """Return the rank that each rank of a communicator has in the job; its own number where the job lacks it."""
    native: Any = getattr(mpi_comm, "native", mpi_comm)
    if not isinstance(native, MPI.Comm):  # of threads
        return tuple(native.members)
    group, everyone = native.Get_group(), MPI.COMM_WORLD.Get_group()
    found = MPI.Group.Translate_ranks(group, None, everyone)
    group.Free()
    everyone.Free()
    return tuple(one if one >= 0 else rank for rank, one in enumerate(found))


def validate_ranks_per_node(given: int | None) -> int | None:
    """Return the argument of `Communicator`.

    Raises
    ------
    TypeError, ValueError
        It is no integer of 1 or more, nor None.
    """
    if given is None or isinstance(given, NodeLabel):
        return given
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"ranks_per_node must be a whole number, not {given!r}")
    if given < 1:
        raise ValueError(f"ranks_per_node must be 1 or more, not {given}")
    return int(given)


class Closable(Protocol):
    """Resource that the communicators of a node keep for their users."""

    def close(self) -> None:
        """Free it."""
        ...


class Nodes:
    """Communicators of a two-level exchange, within this rank's node and between nodes. `Communicator.nodes` makes it.

    A node with more ranks than another one has local ranks that some nodes lack. Their `across` has the nodes that do
    have them.

    Parameters
    ----------
    local, across : Communicator
    layout : NodeLayout

    Attributes
    ----------
    local : Communicator
        Ranks of this rank's node, in rank order.
    across : Communicator
        Ranks that have this rank's number on their nodes, one of each node, in the order of nodes.
    layout : NodeLayout
    sizes : tuple of int
        Ranks of each node. Nodes are numbered in the order of their lowest ranks.
    node : int
        Number of this rank's node.
    n_shards : int
        Ranks of the smallest node: the largest number of parts of a vector that each node has an owner for.

    Examples
    --------
    >>> import mpicomp
    >>> def sum_in_two_levels(comm):
    ...     nodes = comm.nodes
    ...     return nodes.sizes, nodes.across.allreduce(nodes.local.allreduce(comm.rank))
    >>> mpicomp.run_local(4, sum_in_two_levels, ranks_per_node=2)
    [((2, 2), 6), ((2, 2), 6), ((2, 2), 6), ((2, 2), 6)]
    """

    def __init__(self, local: Communicator, across: Communicator, layout: NodeLayout) -> None:
        self.local, self.across, self.layout = local, across, layout
        self.sizes, self.node, self.n_shards = layout.sizes, layout.node, layout.n_shards
        self.groups: dict[str, Closable] = {}  # of other libraries among the ranks of the node, by their names

    def __repr__(self) -> str:
        ranks = "1 rank" if self.local.size == 1 else f"{self.local.size} ranks"
        return f"<Nodes: {len(self.sizes)}, this is number {self.node}, with {ranks}>"

    def close(self) -> None:
        """Close both communicators, and groups of other libraries; collective."""
        while self.groups:
            self.groups.popitem()[1].close()
        self.across.trace = None  # the whole communicator writes it, and compares the clocks
        self.across.close()
        self.local.close()


def open_nodes(comm: Communicator, layout: NodeLayout) -> Nodes:
    """Make the communicators of both levels of a layout; collective.

    The topology between nodes is that of `comm`.

    Raises
    ------
    TopologyError
        The topology does not fit the number of nodes.
    CollectiveMismatch, CollectiveTimeout, PeerFailure
    """
    local = comm.split(layout.node, comm.rank, topology="auto")
    across = comm.split(layout.local_rank, layout.node)
    assert local is not None
    assert across is not None
    # of messages, which number the ranks by their places there
    local.here = f"{comm.here}, among the {local.size} of its node"
    across.here = f"{comm.here}, among the nodes, of which this is number {layout.node}"
    # calls of these two are parts of calls of `comm`, which regroups for all three
    local.repeats_calls = across.repeats_calls = comm.repeats_calls
    if comm.trace is not None:
        across.trace = comm.trace.part(layout.counterparts)
    return Nodes(local, across, layout)
