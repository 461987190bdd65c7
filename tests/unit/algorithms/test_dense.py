"""Dense on one rank is the vector itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpicomp import Communicator, Dense


@pytest.mark.parametrize("n", [1, 64, 4097, 100_003])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_mean_over_one_rank_is_the_vector(n: int, kind: torch.dtype, comm: Communicator) -> None:
    vector = torch.from_numpy(np.random.default_rng(n).standard_normal(n)).to(kind)
    aggregator = Dense().start(comm, n, dtype=str(kind).removeprefix("torch."))
    for _ in range(2):
        assert torch.equal(aggregator.aggregate(vector), vector)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_largest_numbers_of_a_type_are_no_infinity(kind: torch.dtype, comm: Communicator) -> None:
    vector = torch.full((100,), torch.finfo(kind).max, dtype=kind)
    assert torch.equal(Dense().start(comm, 100, dtype=str(kind).removeprefix("torch.")).aggregate(vector), vector)
