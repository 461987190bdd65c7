"""Communicators within a node and between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from collectives.communicator.splitting import abandon
from collectives.consistency.part_ranks import ranks_in
from collectives.errors import RanksLost
from collectives.nodes.layout import NodeLayout

if TYPE_CHECKING:
    from collectives.communicator.facade import Communicator


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
        self.across.observer = None  # the whole communicator writes it, and compares the clocks
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
    assert local is not None
    try:
        across = comm.split(layout.local_rank, layout.node)
    except RanksLost:
        abandon(local, "a rank died while the ranks made the communicator between nodes")
        raise
    assert across is not None
    # of messages, which number the ranks by their places there
    local.here = f"{comm.here}, among the {local.size} of its node"
    across.here = f"{comm.here}, among the nodes, of which this is number {layout.node}"
    # calls of these two are parts of calls of `comm`, which regroups for all three
    local.repeats_calls = across.repeats_calls = comm.repeats_calls
    if comm.observer is not None:
        across.observer = comm.observer.of_ranks(layout.counterparts)
    return Nodes(local, across, layout)


def layout_of_parts(comm: Communicator, part: Communicator) -> NodeLayout:
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
    everyones = [[one for one in found[rank] if comm.recovery is None or one in now] for rank in now]
    layout = NodeLayout.of_keys([members[0] for members in everyones], comm.rank)
    for rank, members in enumerate(everyones):
        place, size = members.index(now[rank]), len(members)
        if place != layout.places[rank] or size != layout.sizes[layout.node_of[rank]]:
            raise ValueError(
                f"rank {rank} is number {place} of the {size} ranks of its part, and number {layout.places[rank]} "
                f"of the {layout.sizes[layout.node_of[rank]]} ranks of this communicator there: split it in parts "
                "by split(color), which keeps the order of ranks"
            )
    return layout
