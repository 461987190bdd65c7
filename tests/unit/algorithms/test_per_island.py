"""PerIsland: the results of PerNode for vectors that are equal within nodes, and weights of unequal islands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.communicator.nodes import layout_of_parts
from collectives.nodes.layout import NodeLayout
from mpicomp import QSGD, Communicator, Dense, DoubleSqueeze, Marsit, PerNode, SparseLoCo, run_local
from mpicomp.algorithms.per_island import IslandMean, Islands, PerIsland

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
        islands = PerIsland(method, local, islands=Islands(comm.layout, comm.members)).start(
            comm, N, tensor_lengths=[N]
        )
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
            layout = layout_of_parts(comm, part)
        aggregator = PerIsland(Dense(), islands=Islands(layout, comm.members)).start(comm, N)
        return layout.sizes, aggregator.aggregate(vector(layout.node, 0))

    mean = (vector(0, 0) + 2 * vector(1, 0)) / 3
    for sizes, result in run_local(3, work):
        assert sizes == (1, 2)
        np.testing.assert_allclose(result, mean, rtol=1e-5, atol=1e-6)


def test_a_single_island_has_its_vector() -> None:
    def work(comm: Communicator) -> Any:
        return PerIsland(Marsit(), islands=Islands(comm.layout, comm.members)).start(comm, N).aggregate(vector(0, 0))

    for result in run_local(2, work):
        np.testing.assert_array_equal(result, vector(0, 0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_mean_of_an_island_is_that_of_its_ranks_alone(dtype: str) -> None:
    """Islands of two ranks and of one; NaN stays in its island, and is no error."""

    def work(comm: Communicator) -> Any:
        layout = NodeLayout.of_keys([0, 0, 1], comm.rank)
        own = np.full(N, 1.0 + comm.rank).astype(dtype)
        own[0] = np.nan if comm.rank == 1 else 1
        return IslandMean(Islands(layout, comm.members)).start(comm, N, dtype=dtype).aggregate(own)

    first, second, alone = run_local(3, work)
    np.testing.assert_array_equal(first, second)
    assert np.isnan(first[0])
    assert (first[1:] == 1.5).all()
    assert alone[0] == 1
    assert (alone[1:] == 3).all()


def test_islands_lose_their_dead_ranks() -> None:
    def work(comm: Communicator) -> Any:
        islands = Islands(NodeLayout.of_keys([0, 0, 1, 1], (0, 1, 3)[comm.rank]), (4, 5, 6, 7))
        left = SimpleNamespace(members=(4, 5, 7), rank=comm.rank)
        return islands.now(left)  # type: ignore[arg-type]

    layouts = run_local(3, work)
    assert {layout.sizes for layout in layouts} == {(2, 1)}
    assert [layout.node for layout in layouts] == [0, 0, 1]
