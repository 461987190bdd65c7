"""The aggregators of an optimizer's buckets, and the order in which parameters fill these.

The buckets are laid out at the first synchronization, in the order in which the first backward brought the gradients:
gradients that come together then travel together. Parameters whose gradients did not come are last, in reverse order of
registration. Parameters that join while the optimizer trains have buckets behind those that exist, which stay as they
are, with their residuals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from collectives import Communicator
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_layout import group_parameters, members_by_name, total_mb
from mpicomp.torch.buckets.bucket_reducer import BucketReducer, VectorPair, bucket_for
from mpicomp.torch.parameters import NamedParameter

_ONE_FRAGMENT: Mapping[str, int] = MappingProxyType({})
FEWEST = 8
"""Buckets of a model that is not small: nothing is sent before the first is complete, nor computed behind the last."""
SMALLEST_MB, SMALLEST_ALONE_MB = 1.0, 8.0
"""Least limits of a bucket: of one in flight with others, and of one that is reduced alone, where a split only adds
messages."""


class BucketReducers(list[BucketReducer]):
    """The reducers of all buckets, in the order in which they begin; empty until `lay_out` or `restore`.

    `members` are in order of registration, and `algorithms` has their names. A bucket has members of one fragment, by
    the numbers in `fragment_of`, where members without one have 0. Buckets are no larger than an eighth
    of the model, unless that is less than `least_mb`. Reduced `one_by_one`, buckets of one dtype take turns with one
    pair of vectors: the peak is two buckets, also for large models. Members that join later have buckets of their own
    behind the others.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        algorithms: Mapping[str, Algorithm],
        comm: Communicator,
        bucket_mb: float,
        one_by_one: bool,
        fragment_of: Mapping[str, int] = _ONE_FRAGMENT,
        least_mb: float = SMALLEST_MB,
    ) -> None:
        super().__init__()
        self.members, self.comm = tuple(members), comm
        self._algorithms, self._one_by_one = dict(algorithms), one_by_one
        self._bucket_mb, self._least_mb = bucket_mb, least_mb
        self._shared: dict[tuple[torch.dtype, torch.device], VectorPair] = {}  # by reducers that take turns
        self.fragment_of = dict(fragment_of)
        self._connect(algorithms)
        self.bucket_of: dict[int, int] = {}
        """Bucket by the member's position in `members`."""

    @property
    def names(self) -> list[list[str]]:
        """Names of the members of each bucket."""
        return [reducer.bucket.names for reducer in self]

    def lay_out(self, arrived: Collection[int]) -> None:
        """Make the buckets, unless there are some. Collective; rank 0's order counts.

        `arrived` has positions in `members`, in the order in which their gradients came.
        """
        if self:
            return
        seen = set(arrived)
        order = [*arrived, *(i for i in reversed(range(len(self.members))) if i not in seen)]
        common = repeat_after_deaths(lambda: self.comm.broadcast(np.array(order, np.int64)))
        ordered = [self.members[i] for i in common]
        self._open(self._grouped(ordered, self._algorithms))

    def rehearse(self) -> None:
        """Make the buckets that a first step would probably make, and forget them; not collective.

        A rank that waits for others to die loads the kernels by that.
        """
        if not self:
            with self.comm.tags_unused():
                self._make(self._grouped([*reversed(self.members)], self._algorithms), self._algorithms, {})

    def add(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> Sequence[BucketReducer]:
        """Append buckets of members that join, and return them; collective. The other buckets stay as they are.

        Backward brings the gradients of layers in the reverse of their order, so the members are in that order.
        """
        self._connect(algorithms)
        groups = self._grouped([*reversed(members)], algorithms)
        added = self._make(groups, algorithms, self._shared, first=len(self))
        self._take_in(members, algorithms)
        self += added
        self._index()
        return added

    def restore(
        self, names: Sequence[Sequence[str]], joining: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]
    ) -> list[NamedParameter]:
        """Have the buckets that a state was saved with, by their members' names; collective.

        Returns
        -------
        list
            Those of the `joining` members that the state has: they are among the members from now on.
        """
        if names == self.names:
            return []
        groups = members_by_name(names, self.members, "this optimizer", joining)
        saved = {member.name for group in groups for member in group}
        joined = [member for member in joining if member.name in saved]
        self._take_in(joined, algorithms)
        self._open(groups)
        return joined

    @contextmanager
    def trial(
        self, names: Sequence[Sequence[str]], joining: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]
    ) -> Iterator[Sequence[BucketReducer]]:
        """Yield reducers as `restore` would make them, which must not communicate; raises the same errors."""
        if names == self.names:
            yield self
            return
        groups = members_by_name(names, self.members, "this optimizer", joining)
        with self.comm.tags_unused():
            yield self._make(groups, {**self._algorithms, **algorithms}, {})

    def _grouped(
        self, ordered: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]
    ) -> list[list[NamedParameter]]:
        limit_mb = min(self._bucket_mb, max(self._least_mb, total_mb(self.members) / FEWEST))

        def kind(member: NamedParameter) -> tuple[int, str]:
            return self.fragment_of.get(member.name, 0), str(algorithms[member.name])

        return group_parameters(ordered, limit_mb, kind)

    def _connect(self, algorithms: Mapping[str, Algorithm]) -> None:
        for algorithm in dict.fromkeys(algorithms.values()):
            repeat_after_deaths(partial(algorithm.connect, self.comm))  # now, as a state may be tried on a single rank

    def _take_in(self, members: Sequence[NamedParameter], algorithms: Mapping[str, Algorithm]) -> None:
        self.members += tuple(members)
        self._algorithms |= {member.name: algorithms[member.name] for member in members}

    def _open(self, groups: Sequence[Sequence[NamedParameter]]) -> None:
        self._shared.clear()
        self[:] = self._make(groups, self._algorithms, self._shared)
        self._index()

    def _index(self) -> None:
        position = {member.name: i for i, member in enumerate(self.members)}
        self.bucket_of = {position[m.name]: one.bucket.index for one in self for m in one.bucket.members}

    def _make(
        self,
        groups: Sequence[Sequence[NamedParameter]],
        algorithm_of: Mapping[str, Algorithm],
        shared: dict[tuple[torch.dtype, torch.device], VectorPair],
        first: int = 0,
    ) -> list[BucketReducer]:
        algorithms = [algorithm_of[group[0].name] for group in groups]
        numbered = enumerate(zip(groups, algorithms, strict=True), first)
        buckets = [bucket_for(index, group, algorithm) for index, (group, algorithm) in numbered]
        if self._one_by_one:
            longest = {(one.dtype, one.device): one for one in sorted(buckets, key=lambda bucket: bucket.n)}
            for kind, bucket in longest.items():
                if kind not in shared or shared[kind].n < bucket.n:
                    shared[kind] = VectorPair(bucket)
            pairs = [shared[bucket.dtype, bucket.device] for bucket in buckets]
        else:
            pairs = [VectorPair(bucket) for bucket in buckets]
        parts = zip(buckets, pairs, algorithms, strict=True)
        return [BucketReducer(bucket, pair, algorithm, self.comm) for bucket, pair, algorithm in parts]
