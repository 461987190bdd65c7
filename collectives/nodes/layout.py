"""Nodes of a communicator: which ranks share memory."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
from mpi4py import MPI

from collectives.annotations import Indices
from collectives.checksum import digest
from collectives.consistency.part_ranks import ranks_in
from collectives.errors import DamagedMessage
from collectives.progress.polling import wait
from collectives.quoting import list_ranks
from collectives.transports import carrier, has_processes

# Arguments that must be equal on all ranks: their columns in the rows that ranks exchange, and the value in a message.
_COMPARED: tuple[tuple[str, int, Callable[[int], object]], ...] = (
    ("ranks_per_node", 2, lambda given: given or None), ("checksums", 3, bool), ("spares", 5, int),
    ("on_failure", 6, ("raise", "regroup").__getitem__),
)  # fmt: skip


class NodeLabel(int):
    """Number of this rank's node, in the group that was split or over an emulated link; replaces `ranks_per_node`."""


@dataclass(frozen=True)
class NodeLayout:
    """Node of each rank."""

    node_of: tuple[int, ...]  # in rank order; nodes are numbered in the order of their lowest ranks
    rank: int  # this one

    @classmethod
    def of_keys(cls, keys: Sequence[object], rank: int) -> NodeLayout:
        """Return the layout of ranks whose nodes have these keys."""
        numbers: dict[object, int] = {}
        return cls(tuple(numbers.setdefault(key, len(numbers)) for key in keys), rank)

    def of_ranks(self, numbers: Sequence[int], rank: int) -> NodeLayout:
        """Return the layout of the ranks that had these numbers; `rank` is this rank's number among them."""
        return NodeLayout.of_keys([self.node_of[one] for one in numbers], rank)

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
    """Return the layouts of nodes and hosts, a name of the communicator, and damage that was found; collective."""
    if isinstance(ranks_per_node, NodeLabel):
        part, given = int(ranks_per_node), 0
    else:
        part, given = (0, 0) if ranks_per_node is None else (host.rank // ranks_per_node, ranks_per_node)
    # `host` has the ranks of this host, all of which are there
    first = ranks_in(mpi_comm, host)[0]
    mine = np.array([first, part, given, checksums, secrets.randbits(62), spares, regroups, 0], np.int64)
    mine[-1] = _seal_of(mine)
    everyones = np.empty((mpi_comm.size, mine.size), np.int64)
    here = f"rank {mpi_comm.rank} of {mpi_comm.size}"
    wait(mpi_comm.Iallgather(mine, everyones), timeout_s, lambda: f"{here}: not all ranks make a communicator")
    damaged = [rank for rank, row in enumerate(everyones) if row[-1] != _seal_of(row)]
    # damage that this rank has received: the others go on, so it must raise where they can learn of it
    damage = str(DamagedMessage.of(here, damaged[0], mine.nbytes)) if damaged else ""
    if not damage:
        _require_same(everyones)
    nodes, hosts = [tuple(row) for row in everyones[:, :2].tolist()], everyones[:, 0].tolist()
    # a name that no other communicator has, in this job or another, equal on all ranks
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
    native = carrier(mpi_comm)
    if not has_processes(native):
        return tuple(native.members)
    return tuple(one if one >= 0 else rank for rank, one in enumerate(ranks_in(MPI.COMM_WORLD, native)))


def validate_ranks_per_node(given: int | None, default: NodeLabel | None = None) -> int | None:
    """Return the argument of `Communicator`; TypeError or ValueError unless it is an integer of 1 or more, or None."""
    if given is None or isinstance(given, NodeLabel):
        return default if given is None else given
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"ranks_per_node must be a whole number, not {given!r}")
    if given < 1:
        raise ValueError(f"ranks_per_node must be 1 or more, not {given}")
    return int(given)
