"""Lengths of buckets, by whether they are in flight together."""

from __future__ import annotations

import pytest
import torch

import mpicomp
from mpicomp import Communicator
from mpicomp.torch.buckets.bucket_reducers import BucketReducers
from mpicomp.torch.parameters import NamedParameter

MIB_OF_FLOATS = 2**18


@pytest.mark.parametrize(
    ("mib", "bucket_mb", "one_by_one", "buckets"),
    [
        (4, 25.0, False, 4),  # those of 1 MiB are sent behind each other's encoding, or during backward
        (4, 25.0, True, 1),
        (16, 25.0, True, 2),
        (96, 25.0, True, 8),  # an eighth of the model, as with those in flight together
        (96, 25.0, False, 8),
        (4, 2.0, True, 2),
    ],
)
def test_buckets_that_are_reduced_alone_are_not_split_below_8_mib(
    mib: int, bucket_mb: float, one_by_one: bool, buckets: int, comm: Communicator
) -> None:
    tensors = [torch.nn.Parameter(torch.empty(MIB_OF_FLOATS)) for _ in range(mib)]
    members = [NamedParameter(str(index), tensor) for index, tensor in enumerate(tensors)]
    methods = {member.name: mpicomp.Dense() for member in members}
    reducers = BucketReducers(members, methods, comm, bucket_mb, one_by_one)
    reducers.lay_out(range(mib))
    assert [len(names) for names in reducers.names] == [mib // buckets] * buckets
