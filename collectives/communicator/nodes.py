"""Nodes of a communicator: which ranks share memory, and communicators within a node and between nodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from mpi4py import MPI

from collectives.annotations import Indices
from collectives.checksum import digest
from collectives.consistency.part_ranks import ranks_in
from collectives.errors import DamagedMessage
from collectives.progress.polling import wait
from collectives.quoting import list_ranks

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator


# Arguments that must be equal on all ranks: their columns in the rows that ranks exchange, and the value in a message.
_COMPARED: tuple[tuple[str, int, Callable[[int], object]], ...] = (
    ("ranks_per_node", 2, lambda given: given or None), ("checksums", 3, bool), ("spares", 5, int),
    ("on_failure", 6, ("raise", "regroup").__getitem__),
)  # fmt: skip


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
        """Return the layout whose nodes are the parts of `comm` that each rank passes; collective among `comm` alone.

        Where `comm` regroups, ranks of a part that it lacks are left out, as they may have died.

        Raises
        ------
        ValueError
            A part has other ranks than those that pass it, or has them in another order; on every rank.
        """
        # without a call of the part, which ends by PeerFailure where a rank dies, while other parts go on
        before = comm.members
        mine = [before[one] if one >= 0 else one for one in ranks_in(comm.mpi_comm, part.mpi_comm)]
        found, now = dict(comm.allgather_object((before[comm.rank], mine))), comm.members
        # without ranks that have died before this call or in it
        everyones = [[one for one in found[rank] if comm.regroup is None or one in now] for rank in now]
        layout = cls.of_keys([members[0] for members in everyones], comm.rank)
        for rank, members in enumerate(everyones):
            place, size = members.index(now[rank]), len(members)
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
) -> tuple[NodeLayout, NodeLayout, str, str]:
    """Return the layouts of nodes and of hosts of a communicator, whose ranks on this host are `host`; collective.

    The third value is a name of the communicator that no other one has, in this job or another, equal on all ranks. The
    last one is the text of a damaged message that this rank has received, else empty: the other ranks go on, so that
    this one has to raise the error where they can learn of it.

    All ranks are there.

    Raises
    ------
    ValueError
        The ranks pass different `ranks_per_node`, `checksums`, `spares` or `on_failure`; on every rank.
    """
    if isinstance(ranks_per_node, NodeLabel):
        part, given = int(ranks_per_node), 0
    else:
        part, given = (0, 0) if ranks_per_node is None else (host.rank // ranks_per_node, ranks_per_node)
    first = ranks_in(mpi_comm, host)[0]
    mine = np.array([first, part, given, checksums, secrets.randbits(62), spares, regroups, 0], np.int64)
    mine[-1] = _seal_of(mine)
    everyones = np.empty((mpi_comm.size, mine.size), np.int64)
    here = f"rank {mpi_comm.rank} of {mpi_comm.size}"
    wait(mpi_comm.Iallgather(mine, everyones), timeout_s, lambda: f"{here}: not all ranks make a communicator")
    damaged = [rank for rank, row in enumerate(everyones) if row[-1] != _seal_of(row)]
    damage = str(DamagedMessage.of(here, damaged[0], mine.nbytes)) if damaged else ""
    if not damage:
        _require_same(everyones)
    nodes, hosts = [tuple(row) for row in everyones[:, :2].tolist()], everyones[:, 0].tolist()
    key = f"{everyones[0, 4]:016x}"
    return NodeLayout.of_keys(nodes, mpi_comm.rank), NodeLayout.of_keys(hosts, mpi_comm.rank), key, damage


def _seal_of(row: Indices) -> int:
    """Return a checksum of a rank's arguments, which has its place behind them: no rank knows those of others yet."""
    return digest(row[:-1].view(np.uint8)) >> 1


def _require_same(everyones: Indices) -> None:
    for name, column, show in _COMPARED:
        others = np.flatnonzero(everyones[:, column] != everyones[0, column]).tolist()
        if others:
            here, there = (show(int(everyones[rank, column])) for rank in (0, others[0]))
            raise ValueError(
                f"{name} is {here!r} on rank 0 and {there!r} on {list_ranks(others)}: pass the same on all ranks"
            )


def members_of(mpi_comm: MPI.Comm) -> tuple[int, ...]:
    """Return the rank that each rank of a communicator has in the job; its own number where the job lacks it."""
    native: Any = getattr(mpi_comm, "native", mpi_comm)
    if not isinstance(native, MPI.Comm):  # of threads
        return tuple(native.members)
    return tuple(one if one >= 0 else rank for rank, one in enumerate(ranks_in(MPI.COMM_WORLD, native)))


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

    def clean_up(self) -> None:
        """Remove shared files, once all ranks of the node have freed it."""
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
        closed = [*self.groups.values()]
        self.groups.clear()
        for group in closed:
            group.close()
        self.across.trace = None  # the whole communicator writes it, and compares the clocks
        self.across.close()
        self.local.close()  # which all ranks of the node come to
        for group in closed:
            group.clean_up()


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
