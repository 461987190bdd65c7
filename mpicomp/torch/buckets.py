"""Parameters laid out in flat vectors, each small enough to be a unit of communication.

A bucket holds whole tensors of one dtype in the optimizer's order. For methods that treat tensors apart every one
starts at a multiple of 64 elements, so that none shares a word of packed signs with another; the gap behind it is
padding, kept at zero on the way in and ignored on the way out. For others they lie end to end, as zeros would count in
their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives import Communicator
from collectives.errors import NonFiniteGradient
from mpicomp.algorithms import Algorithm

ALIGNMENT = 64
"""Elements: one 64-bit word of packed signs."""


@dataclass(frozen=True)
class NamedParameter:
    """A parameter and what error messages call it."""

    name: str
    parameter: Tensor


@dataclass(frozen=True, eq=False)
class Bucket:
    """Parameters that share one flat vector.

    Attributes
    ----------
    index
        Position among all buckets; distinguishes their random streams.
    dtype
        Of the flat vector.
    members
        The parameters, in vector order.
    alignment
        Elements: members start at multiples of it.
    """

    index: int
    dtype: torch.dtype
    members: tuple[NamedParameter, ...]
    alignment: int = ALIGNMENT

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements each member occupies, padding included."""
        return tuple(_padded(member.parameter.numel(), self.alignment) for member in self.members)

    @property
    def n(self) -> int:
        """Elements of the flat vector."""
        return sum(self.lengths)

    def padding(self) -> Tensor:
        """Indices (int64) of the vector's padding elements."""
        places = torch.split(torch.arange(self.n), list(self.lengths))
        return torch.cat([own[m.parameter.numel() :] for m, own in zip(self.members, places, strict=True)])

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each member's part of `flat` (at least ``n`` elements), in the member's shape; no copy."""
        starts = accumulate(self.lengths, initial=0)
        tensors = [member.parameter for member in self.members]
        return [flat[at : at + one.numel()].view(one.shape) for at, one in zip(starts, tensors, strict=False)]


def make_buckets(
    parameters: Iterable[NamedParameter], bucket_mb: float, alignment: int = ALIGNMENT
) -> tuple[Bucket, ...]:
    """Group parameters by dtype, in order, into buckets of up to `bucket_mb` MiB.

    A tensor larger than that has a bucket to itself. The grouping depends on the parameters' order, shapes and dtypes
    alone, so ranks with the same model have the same buckets.
    """
    limit_bytes = bucket_mb * 2**20
    open_groups: dict[torch.dtype, list[NamedParameter]] = {}
    groups: list[list[NamedParameter]] = []
    for member in parameters:
        dtype = member.parameter.dtype
        group = open_groups.get(dtype)
        if group is None or _nbytes([*group, member]) > limit_bytes:
            group = open_groups[dtype] = []
            groups.append(group)
        group.append(member)
    return tuple(Bucket(i, group[0].parameter.dtype, tuple(group), alignment) for i, group in enumerate(groups))


def _padded(numel: int, alignment: int = ALIGNMENT) -> int:
    return -(-numel // alignment) * alignment


def _nbytes(members: Sequence[NamedParameter]) -> int:
    return sum(_padded(m.parameter.numel()) * m.parameter.element_size() for m in members)


def open_bucket_reducers(
    members: Sequence[NamedParameter], algorithm: Algorithm, comm: Communicator, bucket_mb: float
) -> tuple[BucketReducer, ...]:
    """One reducer per bucket of `members`. Collective: every rank of `comm` calls it with the same members."""
    buckets = make_buckets(members, bucket_mb, ALIGNMENT if algorithm.uses_tensor_lengths else 1)
    # Lanes are used one after the other, so those of one dtype take turns with one pair of vectors: the peak is two
    # buckets whatever the size of the model.
    longest = {bucket.dtype: bucket.n for bucket in sorted(buckets, key=lambda bucket: bucket.n)}
    pairs = {dtype: torch.zeros(2, n, dtype=dtype) for dtype, n in longest.items()}
    return tuple(BucketReducer(bucket, pairs[bucket.dtype], algorithm, comm) for bucket in buckets)


class BucketReducer:
    """A bucket's flat input and output vectors and the aggregator between them.

    Attributes
    ----------
    vector, mean
        Flat tensors of ``bucket.n`` elements: the aggregator's input and output, shared with other reducers.
    vector_views, mean_views
        The members' parts of them, in the members' shapes.
    """

    def __init__(self, bucket: Bucket, pair: Tensor, algorithm: Algorithm, comm: Communicator) -> None:
        self.bucket = bucket
        self.parameters = [member.parameter for member in bucket.members]
        self.vector, self.mean = pair[0, : bucket.n], pair[1, : bucket.n]
        self.vector_views, self.mean_views = bucket.views(self.vector), bucket.views(self.mean)
        self._padding = bucket.padding()
        self._vector_array, self._mean_array = _as_array(self.vector), _as_array(self.mean)
        dtype = str(bucket.dtype).removeprefix("torch.")
        lengths = tuple(member.parameter.numel() for member in bucket.members if member.parameter.numel())
        self.aggregator = algorithm.start(comm, bucket.n, dtype=dtype, vector_id=bucket.index, tensor_lengths=lengths)

    def aggregate(self) -> None:
        """Write the ranks' mean of ``vector`` into ``mean``. The padding of ``vector`` is zeroed first.

        Raises
        ------
        NonFiniteGradient
            Names the ranks with NaN or infinity, and the tensors of this rank that hold it.
        """
        self.vector.index_fill_(0, self._padding, 0)
        try:
            self.aggregator.aggregate(self._vector_array, out=self._mean_array)
        except NonFiniteGradient as error:
            pairs = zip(self.bucket.members, self.vector_views, strict=True)
            names = [repr(member.name) for member, view in pairs if not torch.isfinite(view).all()]
            if not names:
                raise
            raise NonFiniteGradient(f"{error}; on this rank in {', '.join(names)}", error.ranks) from error


def _as_array(tensor: Tensor) -> NDArray[Any] | Tensor:
    """A NumPy view of the tensor's memory, or the tensor itself for bfloat16, which NumPy lacks."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()
