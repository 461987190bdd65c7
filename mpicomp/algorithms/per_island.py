"""PerIsland: a method between islands, whose ranks hold equal vectors.

    island r, local rank l:   s_r,l = shard l of the island's vector, times L_r R/M
    between islands, shard l: d_l   = the method's result for s_1,l ... s_R,l
    result on all M ranks:    d_1 ... d_L

R islands have M ranks in all, and island r has L_r of them. With equal islands s is the vector itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from collectives import Communicator
from collectives.annotations import override
from collectives.communicator.nodes import layout_of_parts
from collectives.nodes.layout import NodeLayout
from mpicomp.aggregator.algorithm import Algorithm, Driver, MessageModel, Parts, VectorSpec
from mpicomp.algorithms.dense import Dense
from mpicomp.algorithms.per_node import PerNode
from mpicomp.nodes.driver import LocalMeanDriver
from mpicomp.reducers.full_precision_mean import mean_in
from mpicomp.spaces import space_at


@dataclass(frozen=True)
class Islands:
    """Islands of the ranks of a communicator, which lose their dead ranks when it regroups.

    Parameters
    ----------
    layout : NodeLayout
    members : tuple of int
        `Communicator.members` when the layout was made.
    """

    layout: NodeLayout
    members: tuple[int, ...]

    @classmethod
    def of(cls, comm: Communicator, part: Communicator) -> Islands:
        """Return the islands of which each rank passes its own; collective.

        Raises
        ------
        ValueError
            As by `layout_of_parts`.
        """
        return cls(layout_of_parts(comm, part), comm.members)

    @classmethod
    def of_keys(cls, comm: Communicator, keys: Sequence[object]) -> Islands:
        """Return the islands of ranks that have these keys, equal ones on an island."""
        return cls(NodeLayout.of_keys(keys, comm.rank), comm.members)

    def now(self, comm: Communicator) -> NodeLayout:
        """Return the islands of the ranks that are left."""
        if comm.members == self.members:
            return self.layout
        return self.layout.of_ranks([self.members.index(one) for one in comm.members], comm.rank)


@dataclass(frozen=True)
class PerIsland(PerNode):
    """Method between islands, of which each rank carries a share of the vector.

    Parameters
    ----------
    algorithm, local
        As for `PerNode`.
    islands : Islands

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.algorithms.per_island import Islands, PerIsland
    >>> def average(comm):
    ...     islands = Islands(comm.layout, comm.members)  # two of two ranks
    ...     update = np.array([1.0, 2.0, comm.rank // 2], np.float32)
    ...     return PerIsland(mpicomp.Dense(), islands=islands).start(comm, 3).aggregate(update)
    >>> mpicomp.run_local(4, average, ranks_per_node=2)[0]
    array([1. , 2. , 0.5], dtype=float32)
    """

    islands: Islands = field(kw_only=True, compare=False, repr=False)

    equal_within_nodes: ClassVar[bool] = True

    @override
    def layout_of(self, comm: Communicator) -> NodeLayout:
        return self.islands.now(comm)


@dataclass(frozen=True)
class IslandMean(Algorithm):
    """Exact mean over the ranks of each island, as a call of all ranks: it ends on all of them, or is made again.

    NaN and infinity are averaged, too.

    Parameters
    ----------
    islands : Islands
    """

    islands: Islands = field(compare=False, repr=False)

    @override
    def connect(self, comm: Communicator) -> None:
        comm.nodes_of(self.islands.now(comm))

    def parts(self, comm: Communicator, spec: VectorSpec) -> Parts:
        """Return the parts of the exact mean, over the ranks of this rank's island."""
        return Dense().parts(comm.nodes_of(self.islands.now(comm)).local, spec)

    @override
    def assemble(self, comm: Communicator, spec: VectorSpec) -> tuple[Parts, Driver]:
        local = comm.nodes_of(self.islands.now(comm)).local
        mean = mean_in(space_at(spec.device), spec.n, spec.dtype)
        return Dense().parts(local, spec), LocalMeanDriver(local, spec, self, mean)

    @override
    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        return Dense().message_model(n, dtype, ranks, piece_bytes)
