"""PerIsland: a method between islands, whose ranks hold equal vectors.

    island r, local rank l:   s_r,l = shard l of the island's vector, times L_r R/M
    between islands, shard l: d_l   = the method's result for s_1,l ... s_R,l
    result on all M ranks:    d_1 ... d_L

R islands have M ranks in all, and island r has L_r of them. With equal islands s is the vector itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from collectives import Communicator
from collectives.annotations import override
from collectives.communicator.nodes import NodeLayout
from mpicomp.algorithms.per_node import PerNode


@dataclass(frozen=True)
class PerIsland(PerNode):
    """Method between islands, of which each rank carries a share of the vector.

    Parameters
    ----------
    algorithm, local
        As for `PerNode`.
    layout : NodeLayout
        The islands.

    Examples
    --------
    >>> import numpy as np
    >>> import mpicomp
    >>> from mpicomp.algorithms.per_island import PerIsland
    >>> def average(comm):
    ...     island = comm.rank // 2  # two islands of two ranks
    ...     update = np.array([1.0, 2.0, island], np.float32)
    ...     return PerIsland(mpicomp.Dense(), layout=comm.layout).start(comm, 3).aggregate(update)
    >>> mpicomp.run_local(4, average, ranks_per_node=2)[0]
    array([1. , 2. , 0.5], dtype=float32)
    """

    layout: NodeLayout = field(kw_only=True, compare=False, repr=False)

    equal_within_nodes: ClassVar[bool] = True

    @override
    def layout_of(self, comm: Communicator) -> NodeLayout:
        return self.layout
