"""Buckets keep tensors whole, separate and in order."""

from __future__ import annotations

import pytest
import torch

from mpicomp.torch.buckets.bucket_layout import NamedParameter, group_parameters, make_bucket


def named(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[NamedParameter]:
    return [NamedParameter(f"p{i}", torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(shapes)]


def names(groups: list[list[NamedParameter]]) -> list[list[str]]:
    return [[member.name for member in group] for group in groups]


@pytest.mark.parametrize(
    ("alignment", "lengths", "starts"),
    [(64, (128, 64, 64, 128), (0, 128, 192, 256)), (1, (65, 64, 1, 70), (0, 65, 129, 130))],
)
def test_tensors_start_at_multiples_of_the_alignment_and_padding_is_the_rest(
    alignment: int, lengths: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    bucket = make_bucket(0, named((5, 13), (64,), (), (70,)), alignment)
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
    groups = group_parameters(named((kib,), (kib,), (kib,), (3 * kib,), (kib,)), bucket_mb=2 / 1024)
    assert names(groups) == [["p0", "p1"], ["p2"], ["p3"], ["p4"]]


def test_dtypes_have_buckets_of_their_own_that_interleaving_does_not_split() -> None:
    single, double = named((8,), (8,)), named((8,), (8,), dtype=torch.float64)
    groups = group_parameters([single[0], double[0], single[1], double[1]], bucket_mb=1)
    assert [(group[0].parameter.dtype, len(group)) for group in groups] == [(torch.float32, 2), (torch.float64, 2)]


def test_kinds_have_buckets_of_their_own_that_are_in_the_order_of_their_last_members() -> None:
    groups = group_parameters(named((8,), (8, 8), (8,)), bucket_mb=1, kind=lambda member: member.parameter.ndim)
    assert names(groups) == [["p1"], ["p0", "p2"]]
