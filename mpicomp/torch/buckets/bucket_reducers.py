"""The aggregators of an optimizer's buckets, and the order in which parameters fill these.

The buckets are laid out at the first synchronization, in the order in which the first backward brought the gradients:
gradients that come together then travel together. Parameters whose gradients did not come are last, in reverse order of
registration. Parameters that join while the optimizer trains have buckets behind those that exist, which stay as they
are, with their residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator, Handle
from collectives.annotations import AnyArray
from collectives.arrays.elements import aligned_empty
from collectives.errors import NonFiniteGradient
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.aggregator.difference import Difference
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.feedback import nonfinite
from mpicomp.torch.buckets.bucket_layout import (
    ALIGNMENT,
    Bucket,
    group_parameters,
    make_bucket,
    members_by_name,
    total_mb,
)
from mpicomp.torch.devices import all_finite, begin_event, current_stream, encoding_device
from mpicomp.torch.parameters import NARROW, NamedParameter

_DENSE = Dense()
_ONE_FRAGMENT: Mapping[str, int] = MappingProxyType({})
FEWEST = 8
"""Buckets of a model that is not small: nothing is sent before the first is complete, nor computed behind the last."""
SMALLEST_MB = 1.0
_NUMPY_TYPES = {  # of bfloat16, which NumPy lacks, the bits
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


class BucketReducer:
    """A bucket's flat input and output vectors and the aggregator between them.

    Attributes
    ----------
    vector, mean
        Flat tensors of ``bucket.n`` elements: the aggregator's input and output, maybe shared with other reducers.
    vector_views, mean_views
        The members' parts of them, in the members' shapes. They stay here: see `fresh_mean_views`.
    padding_is_zero : bool
        Flag: the owner writes the members' parts of ``vector`` alone, which is no other reducer's.
    """

    def __init__(self, bucket: Bucket, pair: VectorPair, algorithm: Algorithm, comm: Communicator) -> None:
        self.bucket = bucket
        self.parameters = [member.parameter for member in bucket.members]
        self._pair = pair
        tensors = pair.tensors()
        self.vector, self.mean = tensors[0, : bucket.n], tensors[1, : bucket.n]
        self.vector_views, self.mean_views = bucket.views(self.vector), bucket.views(self.mean)
        self._padding = bucket.padding()
        self._vector_array, self._mean_array = _as_array(self.vector), _as_array(self.mean)
        dtype = str(bucket.dtype).removeprefix("torch.")
        shapes = tuple(tuple(member.parameter.shape) for member in bucket.members if member.parameter.numel())
        device = encoding_device(algorithm, dtype, bucket.device)
        self.aggregator = algorithm.start(
            comm, bucket.n, dtype=dtype, vector_id=bucket.index, tensor_shapes=shapes, device=device
        )
        self.padding_is_zero = False
        self.aggregator.views.fix(self._vector_array, self._mean_array)
        self._is_exact = algorithm == _DENSE
        self._handle: Handle | None = None
        self._alone: Callable[[], None] | None = None  # postponed search of values taken alone, by `wait`
        self._moves: Difference | None = None
        self.leaves_residual = algorithm.leaves_residual
        self._event_name = type(algorithm).__name__  # in profiles
        self._end_event: Callable[[], None] | None = None

    def take_moves(self, before: list[Tensor], after: list[Tensor], may_stay_packed: bool = True) -> None:
        """Use the members' moves, their values before less those after, as the ``vector`` of the next call.

        `after` may lie in ``vector``. Both must be left alone until the call has ended. Unless the result
        `may_stay_packed` for `subtract_mean`, the call writes ``mean``.
        """
        if isinstance(self._vector_array, Tensor):
            torch._foreach_copy_(self.vector_views, torch._foreach_sub(before, after))
            return
        filled = [one.numel() > 0 for one in before]
        were, are, views = ([t.numpy() for t in compress(side, filled)] for side in (before, after, self.vector_views))
        self._moves = Difference(were, are, views, self._vector_array, may_stay_packed)

    def write_moves(self) -> None:
        """Write the moves, if the next call is given some, into ``vector``; the call then writes ``mean``."""
        moves, self._moves = self._moves, None
        if moves is not None:
            moves.take()

    def fresh_mean_views(self) -> list[Tensor]:
        """Return the members' means as new tensors on the memory of ``mean``, which a caller may keep and rebind.

        ``p.grad.data = ...`` and ``share_memory_()`` give a tensor, or the storage under it, other memory. Views that
        this object went on using would then show old values, and NumPy arrays would lie in memory that was freed.
        """
        return self.bucket.tensors(self._pair.tensors(), 1)

    def fresh_vector_views(self) -> list[Tensor]:
        """Return the members' parts of ``vector`` as new tensors, like `fresh_mean_views`."""
        return self.bucket.tensors(self._pair.tensors(), 0)

    def subtract_mean(self) -> None:
        """Subtract the mean of the moves from the members' values before; the call has ended without an error."""
        moves, self._moves = self._moves, None
        if moves is None or not moves.subtract_result():
            torch._foreach_sub_(self.parameters, self.mean_views)

    def left_out(self) -> list[Tensor]:
        """Return the errors of the last step, which the algorithm leaves to its caller, in the members' shapes."""
        errors = self.aggregator.residual
        assert errors is not None
        found = errors if isinstance(errors, Tensor) else torch.from_numpy(errors)
        return self.bucket.views(found.to(self.vector.device))

    def clear(self) -> None:
        """Let the vector of the next call be zeros."""
        self.vector.zero_()
        self._moves = None

    def begin(self) -> Handle:
        """Begin to average ``vector`` over the ranks. Its padding is zeroed first, where it may hold other values."""
        if not self.padding_is_zero:
            self._clear_padding()
        self._end_event = begin_event(self._event_name)
        self._handle = self.aggregator.begin(self._moves or self._vector_array, out=self._mean_array)
        self._handle.detach()  # a user who drops the optimizer after backward did not start this call
        return self._handle

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Stream of this thread on which ``mean`` is used, and which waits for it on a GPU; None: the host waits."""
        return current_stream(self.mean)

    def wait(self) -> bool:
        """Wait until ``mean`` holds the ranks' mean; False if nothing has begun, or the values were taken alone.

        On a GPU the current stream waits instead, once the ranks' messages have arrived.

        Raises
        ------
        NonFiniteGradient
            Names the ranks with NaN or infinity, and the tensors of this rank that hold it.
        """
        handle, self._handle = self._handle, None
        alone, self._alone = self._alone, None
        if alone is not None:
            alone()
        if handle is None:
            return False
        try:
            handle.wait(current_stream(self.mean))
        except NonFiniteGradient as error:
            raise self._naming_tensors(error) from None
        finally:
            if self._end_event is not None:
                self._finish_event()
        return True

    def aggregate(self) -> None:
        """Write the ranks' mean of ``vector`` into ``mean``; raises the errors of `wait`."""
        if not self.padding_is_zero:
            self._clear_padding()
        self._end_event = begin_event(self._event_name)
        try:
            self.aggregator.aggregate(self._moves or self._vector_array, self._mean_array, self.stream)
        except NonFiniteGradient as error:
            raise self._naming_tensors(error) from None
        finally:
            self._finish_event()

    def _clear_padding(self) -> None:
        self.vector.index_fill_(0, self._padding, 0)  # on a device this is a launch

    def take_alone(self, values: Sequence[Tensor], behind: bool = False) -> bool:
        """Take the values as their mean, uncopied, and return True, on a single rank and where nothing is rounded.

        NaN and infinity are searched for at once, while the processor's caches have the values: with `behind` the error
        is kept for `wait`. On a device they are then searched for by `wait`, as the host would wait for the device.

        Raises
        ------
        NonFiniteGradient
            Names the tensors.
        """
        if not self._is_exact or self.aggregator.comm.size > 1:
            return False
        if behind and self.bucket.device.type != "cpu":
            self._alone = partial(self._take_finite, values)
            return True
        try:
            self._take_finite(values)
        except NonFiniteGradient as error:
            if not behind:
                raise
            self._alone = partial(_raise, error)
        return True

    def undo(self) -> None:
        """Take the last step back, which no rank makes; of a residual that cannot be taken back, the count of steps."""
        if self.aggregator.can_undo:
            self.aggregator.undo()
        else:
            self.aggregator.step -= 1  # or full-precision rounds of the buckets would fall in different steps

    def _finish_event(self) -> None:
        end, self._end_event = self._end_event, None
        if end is not None:
            end()

    def _take_finite(self, values: Sequence[Tensor]) -> None:
        names: list[str] = []
        if self.bucket.device.type == "cpu" or not all_finite(values):  # which waits for a device once
            pairs = zip(self.bucket.members, values, strict=True)
            names = [repr(member.name) for member, value in pairs if not _all_finite(value)]
        if names:
            raise nonfinite.error(self.aggregator.comm, (0,), ", ".join(names))
        self.aggregator.count_step()

    def _naming_tensors(self, error: NonFiniteGradient) -> NonFiniteGradient:
        """Return the error with the names of this rank's tensors that are not finite, if there are some."""
        pairs = zip(self.bucket.members, self.vector_views, strict=True)
        names = [repr(member.name) for member, view in pairs if not torch.isfinite(view).all()]
        return NonFiniteGradient(f"{error}; on this rank in {', '.join(names)}", error.ranks) if names else error


class BucketReducers(list[BucketReducer]):
    """The reducers of all buckets, in the order in which they begin; empty until `lay_out` or `restore`.

    `members` are in order of registration, and `algorithms` has their names. A bucket has members of one fragment, by
    the numbers in `fragment_of`, where members without one have 0. Buckets of models above 8 MiB are no
    larger than an eighth of the model. Reduced `one_by_one`, buckets of one dtype take turns with one pair of vectors:
    the peak is two buckets, also for large models. Members that join later have buckets of their own behind the others.
    """

    def __init__(
        self,
        members: Sequence[NamedParameter],
        algorithms: Mapping[str, Algorithm],
        comm: Communicator,
        bucket_mb: float,
        one_by_one: bool,
        fragment_of: Mapping[str, int] = _ONE_FRAGMENT,
    ) -> None:
        super().__init__()
        self.members, self.comm = tuple(members), comm
        self._algorithms, self._bucket_mb, self._one_by_one = dict(algorithms), bucket_mb, one_by_one
        self._shared: dict[tuple[torch.dtype, torch.device], VectorPair] = {}  # by reducers that take turns
        self.fragment_of = dict(fragment_of)
        self._connect(algorithms)
        self.bucket_of: dict[int, int] = {}
        """Bucket by the member's position in `members`."""

    @property
    def names(self) -> list[list[str]]:
        """Names of the members of each bucket."""
        return [reducer.bucket.names for reducer in self]

    def lay_out(self, arrived: Sequence[int]) -> None:
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
        limit_mb = min(self._bucket_mb, max(SMALLEST_MB, total_mb(self.members) / FEWEST))

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
        buckets = [_bucket_for(index, group, algorithm) for index, (group, algorithm) in numbered]
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


class VectorPair:
    """Memory of a vector and its mean, zeros at first, that PyTorch cannot replace: on the host it is NumPy's.

    `bucket` is the longest one that uses it.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.n, self._dtype = bucket.n, bucket.dtype
        self._array: AnyArray | None = None
        if bucket.device.type == "cpu":
            self._array = aligned_empty(2 * bucket.n, _NUMPY_TYPES[bucket.dtype]).reshape(2, bucket.n)
            self._array.fill(0)
        else:
            self._tensors = torch.zeros(2, bucket.n, dtype=bucket.dtype, device=bucket.device)

    def tensors(self) -> Tensor:
        """Return vector and mean, [2, n]: on the host each time with a storage of its own on the same memory."""
        return self._tensors if self._array is None else torch.from_numpy(self._array).view(self._dtype)


def _bucket_for(index: int, members: Sequence[NamedParameter], algorithm: Algorithm) -> Bucket:
    return make_bucket(index, members, ALIGNMENT if algorithm.uses_tensor_lengths else 1)


def open_reducer(
    index: int, members: Sequence[NamedParameter], algorithm: Algorithm, comm: Communicator
) -> BucketReducer:
    """Return the reducer of a bucket of these members, with vectors that are no other reducer's."""
    bucket = _bucket_for(index, members, algorithm)
    return BucketReducer(bucket, VectorPair(bucket), algorithm, comm)


def _raise(error: Exception) -> NoReturn:
    raise error


def _all_finite(values: Tensor) -> bool:
    if values.dtype in NARROW or values.device.type != "cpu" or not values.is_contiguous():
        return bool(torch.isfinite(values).all())
    return nonfinite.all_finite(values.detach().view(-1).numpy())


def _as_array(tensor: Tensor) -> AnyArray | Tensor:
    """Return a NumPy view of the tensor's memory, or the tensor on a device or of bfloat16, which NumPy lacks."""
    return tensor if tensor.device.type != "cpu" or tensor.dtype == torch.bfloat16 else tensor.numpy()
