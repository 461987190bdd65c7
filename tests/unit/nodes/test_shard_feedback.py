"""Survivors continue from a valid state where all owners of a shard have died, and where their own shard was empty."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpicomp
from mpicomp import Communicator, PerNode
from mpicomp.state.redistribute import among_survivors
from tests.methods import METHODS

TENSORS = (4, 256, 64, 1340)  # of two shards the first is empty if they begin where tensors do
N = 64 + 256 + 64 + 1340


@pytest.mark.parametrize("tensors", [TENSORS, (N,)])
@pytest.mark.parametrize("name", METHODS)
def test_the_owner_of_one_shard_takes_over_the_whole_vector(name: str, tensors: tuple[int, ...]) -> None:
    method = PerNode(METHODS[name])
    vector = np.linspace(-1, 1, N, dtype=np.float32)

    def train(comm: Communicator) -> dict[str, Any]:
        aggregator = method.start(comm, N, tensor_lengths=tensors)
        for _ in range(3):
            aggregator.aggregate(vector)
        return aggregator.state_dict()

    states = mpicomp.run_local(4, train, ranks_per_node=2)
    for owner in states[:2]:

        def go_on(comm: Communicator, owner: dict[str, Any] = owner) -> int:
            aggregator = method.start(comm, N, tensor_lengths=tensors)
            fresh = aggregator.state_dict()
            aggregator.load_state_dict(among_survivors([owner], aggregator.state_kinds, aggregator.feedback.stand_in))
            restored = aggregator.state_dict()
            if owner["shard"][0] == owner["shard"][1]:  # it knows nothing of any element
                for key, one in fresh.items():
                    if np.ndim(one) and key != "auto":
                        np.testing.assert_array_equal(restored[key], one)
            assert restored.get("gamma") == owner.get("gamma")
            assert np.isfinite(aggregator.aggregate(vector)).all()
            return int(restored["step"])

        for ranks_per_node in (1, 2):
            assert mpicomp.run_local(2, go_on, ranks_per_node=ranks_per_node) == [3, 3]
