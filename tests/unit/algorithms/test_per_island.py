"""PerIsland: the results of PerNode for vectors that are equal within nodes, and weights of unequal islands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from collectives.communicator.nodes import NodeLayout
from mpicomp import QSGD, Communicator, Dense, DoubleSqueeze, Marsit, PerNode, SparseLoCo, run_local
from mpicomp.algorithms.per_island import PerIsland

N = 3000
METHODS: dict[str, Any] = {
    "dense": Dense(), "marsit": Marsit(2), "qsgd": QSGD(), "double_squeeze": DoubleSqueeze(),
    "sparse_loco": SparseLoCo(16, 64),
}  # fmt: skip


def vector(island: int, step: int) -> Any:
    return np.random.default_rng((island, step)).standard_normal(N).astype(np.float32)


@pytest.mark.parametrize("local", ["shared", "ring"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_equal_vectors_have_the_results_of_their_sums(method: Any, local: Any) -> None:
    """Two equal vectors have an exact sum, so both ways have the same bits."""

    def work(comm: Communicator) -> list[Any]:
        islands = PerIsland(method, local, layout=comm.layout).start(comm, N, tensor_lengths=[N])
        nodes = PerNode(method, local).start(comm, N, tensor_lengths=[N])
        results = []
        for step in range(4):
            one = vector(comm.layout.node, step)
            results.append((islands.aggregate(one).copy(), nodes.aggregate(one).copy()))
        return results

    of_ranks = run_local(4, work, ranks_per_node=2)
    for of_rank in of_ranks:
        for (mine, of_sums), (first, _) in zip(of_rank, of_ranks[0], strict=True):
            np.testing.assert_array_equal(mine, of_sums)
            np.testing.assert_array_equal(mine, first)


def test_islands_count_by_their_ranks() -> None:
    def work(comm: Communicator) -> Any:
        part = comm.split(min(comm.rank, 1))  # rank 0, and ranks 1 and 2
        assert part is not None
        with part:
            layout = NodeLayout.of_parts(comm, part)
        aggregator = PerIsland(Dense(), layout=layout).start(comm, N)
        return layout.sizes, aggregator.aggregate(vector(layout.node, 0))

    mean = (vector(0, 0) + 2 * vector(1, 0)) / 3
    for sizes, result in run_local(3, work):
        assert sizes == (1, 2)
        np.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6)


def test_a_single_island_has_its_vector() -> None:
    def work(comm: Communicator) -> Any:
        return PerIsland(Marsit(), layout=comm.layout).start(comm, N).aggregate(vector(0, 0))

    for result in run_local(2, work):
        np.testing.assert_array_equal(result, vector(0, 0))
