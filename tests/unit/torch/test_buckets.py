"""Buckets keep tensors whole, apart and in order."""

from __future__ import annotations

import pytest
import torch

from mpicomp.torch.buckets import Bucket, NamedParameter, make_buckets


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def names(bucket: Bucket) -> list[str]:
    return [member.name for member in bucket.members]


@pytest.mark.parametrize(
    ("alignment", "lengths", "starts"),
    [(64, (128, 64, 64, 128), (0, 128, 192, 256)), (1, (65, 64, 1, 70), (0, 65, 129, 130))],
)
def test_tensors_start_at_multiples_of_the_alignment_and_padding_is_the_rest(
    alignment: int, lengths: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    (bucket,) = make_buckets(named((5, 13), (64,), (), (70,)), bucket_mb=1, alignment=alignment)
    assert bucket.lengths == lengths
    flat = torch.arange(bucket.n)
    assert tuple(int(view.flatten()[0]) for view in bucket.views(flat)) == starts
    for view in bucket.views(flat):
        view.fill_(-1)
    assert (flat == -1).sum() == 200
    assert len(bucket.padding()) == bucket.n - 200
    assert (flat[bucket.padding()] >= 0).all()


def test_buckets_fill_up_to_the_limit_in_order() -> None:
    kib = 256
    buckets = make_buckets(named((kib,), (kib,), (kib,), (3 * kib,), (kib,)), bucket_mb=2 / 1024)
    assert [names(bucket) for bucket in buckets] == [["p0", "p1"], ["p2"], ["p3"], ["p4"]]
    assert [bucket.index for bucket in buckets] == [0, 1, 2, 3]


def test_dtypes_have_buckets_of_their_own_that_interleaving_does_not_split() -> None:
    single, double = named((8,), (8,)), named((8,), (8,), dtype=torch.float64)
    mixed = [single[0], double[0], single[1], double[1]]
    buckets = make_buckets(mixed, bucket_mb=1)
    assert [(bucket.dtype, len(bucket.members)) for bucket in buckets] == [(torch.float32, 2), (torch.float64, 2)]
