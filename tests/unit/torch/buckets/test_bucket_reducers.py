"""Lengths of buckets, by whether they are in flight together."""

from __future__ import annotations

import pytest
import torch

import mpicomp
from mpicomp import Communicator
from mpicomp.torch import DistributedOptimizer
from mpicomp.torch.buckets.bucket_reducers import SMALLEST_ALONE_MB, SMALLEST_MB, BucketReducers
from mpicomp.torch.parameters import NamedParameter

MIB_OF_FLOATS = 2**18


@pytest.mark.parametrize(
    ("mib", "bucket_mb", "least_mb", "buckets"),
    [
        (4, 25.0, SMALLEST_MB, 4),
        (4, 25.0, SMALLEST_ALONE_MB, 1),
        (16, 25.0, SMALLEST_ALONE_MB, 2),
        (96, 25.0, SMALLEST_ALONE_MB, 8),  # an eighth of the model
        (96, 25.0, SMALLEST_MB, 8),
        (4, 2.0, SMALLEST_ALONE_MB, 2),
    ],
)
def test_buckets_hold_an_eighth_of_the_model_or_the_least_limit(
    mib: int, bucket_mb: float, least_mb: float, buckets: int, comm: Communicator
) -> None:
    tensors = [torch.nn.Parameter(torch.empty(MIB_OF_FLOATS)) for _ in range(mib)]
    members = [NamedParameter(str(index), tensor) for index, tensor in enumerate(tensors)]
    methods = {member.name: mpicomp.Dense() for member in members}
    reducers = BucketReducers(members, methods, comm, bucket_mb, one_by_one=True, least_mb=least_mb)
    reducers.lay_out(range(mib))
    assert [len(names) for names in reducers.names] == [mib // buckets] * buckets


@pytest.mark.parametrize(("overlap", "buckets"), [(False, 1), (True, 4)])
def test_buckets_of_a_small_model_are_split_only_where_they_are_in_flight_together(
    overlap: bool, buckets: int, comm: Communicator
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4)))
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), mpicomp.Dense(), comm, overlap=overlap)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    assert len(optimizer.reducers) == buckets
