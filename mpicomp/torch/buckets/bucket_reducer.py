"""The vectors of one bucket, and the aggregator that averages them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator, Handle
from collectives.annotations import AnyArray
from collectives.arrays.elements import aligned_empty
from collectives.errors import NonFiniteGradient
from mpicomp.aggregator.difference import Difference
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.feedback import nonfinite
from mpicomp.torch.buckets.bucket_layout import ALIGNMENT, Bucket, make_bucket
from mpicomp.torch.devices import all_finite, begin_event, current_stream, encoding_device
from mpicomp.torch.parameters import NARROW, NamedParameter

_DENSE = Dense()
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
        self._prepare()
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
            self._finish_event()
        return True

    def aggregate(self) -> None:
        """Write the ranks' mean of ``vector`` into ``mean``; raises the errors of `wait`."""
        self._prepare()
        try:
            self.aggregator.aggregate(self._moves or self._vector_array, self._mean_array, self.stream)
        except NonFiniteGradient as error:
            raise self._naming_tensors(error) from None
        finally:
            self._finish_event()

    def _prepare(self) -> None:
        if not self.padding_is_zero:
            self.vector.index_fill_(0, self._padding, 0)  # on a device this is a launch
        self._end_event = begin_event(self._event_name)

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


def bucket_for(index: int, members: Sequence[NamedParameter], algorithm: Algorithm) -> Bucket:
    """Return a bucket of these members, with gaps behind them where the algorithm distinguishes tensors."""
    return make_bucket(index, members, ALIGNMENT if algorithm.uses_tensor_lengths else 1)


def open_reducer(
    index: int, members: Sequence[NamedParameter], algorithm: Algorithm, comm: Communicator
) -> BucketReducer:
    """Return the reducer of a bucket of these members, with vectors that are no other reducer's."""
    bucket = bucket_for(index, members, algorithm)
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
