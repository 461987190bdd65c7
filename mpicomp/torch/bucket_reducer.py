"""From a bucket of tensors to its aggregator and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives import Communicator
from collectives.errors import NonFiniteGradient
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets import ALIGNMENT, Bucket, NamedParameter, make_buckets
from mpicomp.torch.states import with_arrays


def open_bucket_reducers(
    members: Sequence[NamedParameter], algorithm: Algorithm, comm: Communicator, bucket_mb: float
) -> tuple[BucketReducer, ...]:
    """One reducer per bucket of `members`. Collective: every rank of `comm` calls it with the same members."""
    buckets = make_buckets(members, bucket_mb, ALIGNMENT if algorithm.uses_tensor_lengths else 1)
    # Lanes are used one after the other, so those of one dtype take turns with one pair of vectors: the peak is two
    # buckets whatever the size of the model.
    longest: dict[torch.dtype, int] = {}
    for bucket in buckets:
        longest[bucket.dtype] = max(longest.get(bucket.dtype, 0), bucket.n)
    pairs = {dtype: torch.zeros(2, n, dtype=dtype) for dtype, n in longest.items()}
    return tuple(BucketReducer(bucket, pairs[bucket.dtype], algorithm, comm) for bucket in buckets)


class BucketReducer:
    """A bucket's flat input and output vectors and the aggregator between them.

    Attributes
    ----------
    bucket
        The bucket served.
    parameters
        Its tensors.
    vector, mean
        Flat tensors of ``bucket.n`` elements: the aggregator's input and output, shared with other reducers.
    vector_views, mean_views
        The members' parts of them, in the members' shapes.
    aggregator
        Owns the bucket's residual and counts its traffic.
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
        tensors = lengths if algorithm.uses_tensor_lengths else None
        self.aggregator = algorithm.start(comm, bucket.n, dtype=dtype, vector_id=bucket.index, tensor_lengths=tensors)

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

    def state_dict(self) -> dict[str, Any]:
        """The aggregator's state with arrays as tensors, as ``torch.load`` reads them under ``weights_only=True``."""
        state = self.aggregator.state_dict()
        return {
            key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in state.items()
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise ValueError if `state` is none that `load_state_dict` takes."""
        self.aggregator.check_state_dict(with_arrays(state))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state`, of tensors or of arrays, was taken."""
        self.aggregator.load_state_dict(with_arrays(state))


def _as_array(tensor: Tensor) -> NDArray[Any] | Tensor:
    """A NumPy view of the tensor's memory, or the tensor itself for bfloat16, which NumPy lacks."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()
