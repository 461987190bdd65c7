"""Buckets keep tensors whole, apart and in order."""

from __future__ import annotations

import torch

from mpicomp.torch.buckets import Bucket, NamedParameter, make_buckets


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def names(bucket: Bucket) -> list[str]:
    return [member.name for member in bucket.members]


def test_every_tensor_starts_at_a_multiple_of_64_elements() -> None:
    (bucket,) = make_buckets(named((5, 13), (64,), (), (1,)), bucket_mb=1)
    assert bucket.lengths == (128, 64, 64, 64)
    flat = torch.arange(bucket.n)
    assert [int(view.flatten()[0]) for view in bucket.views(flat)] == [0, 128, 192, 256]


def test_views_write_into_the_flat_vector_and_padding_is_the_rest() -> None:
    (bucket,) = make_buckets(named((3, 3), (70,)), bucket_mb=1)
    flat = torch.zeros(bucket.n)
    for view in bucket.views(flat):
        view.fill_(1.0)
    assert flat.sum() == 79
    assert flat[bucket.padding()].sum() == 0
    assert len(bucket.padding()) == bucket.n - 79


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


def test_tensors_may_lie_end_to_end() -> None:
    (bucket,) = make_buckets(named((5, 13), (64,), (), (1,)), bucket_mb=1, alignment=1)
    assert bucket.lengths == (65, 64, 1, 1)
    assert len(bucket.padding()) == 0
    flat = torch.arange(bucket.n)
    assert [int(view.flatten()[0]) for view in bucket.views(flat)] == [0, 65, 129, 130]
