"""The vectors in which the gradients of a DistributedDataParallel travel.

They are filled from DDP's buckets and copied back into these, and do not depend on them: DDP regroups its buckets after
the first iteration of each process, while a residual belongs to the same parameters all along. A vector starts when DDP
has brought its last gradient. DDP brings its buckets in one order on all ranks, so the vectors start in one order too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_queue import BucketQueue
from mpicomp.torch.buckets.bucket_reducer import BucketReducer, open_reducer
from mpicomp.torch.devices import devices_of
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name
from mpicomp.torch.parameters import NamedParameter


class Delivery:
    """A bucket that DDP waits for: its `future` holds the buffer once the means of all its vectors are there."""

    def __init__(self, buffer: Tensor, vectors: int) -> None:
        self.future: Future[Tensor] = Future(devices=devices_of([buffer]))
        self._buffer, self._missing = buffer, vectors
        if not vectors:
            self.future.set_result(buffer)

    def arrive(self) -> None:
        """Count a vector whose means are in the buffer."""
        self._missing -= 1
        if not self._missing:
            self.future.set_result(self._buffer)


class GradientVector:
    """A reducer's vector between DDP's buckets."""

    def __init__(self, reducer: BucketReducer) -> None:
        views = zip(reducer.vector_views, reducer.mean_views, strict=True)
        self._views = dict(zip(reducer.parameters, views, strict=True))
        self._empty()

    def copy_in(self, parameters: list[Tensor], gradients: list[Tensor], delivery: Delivery) -> None:
        """Copy gradients from a bucket, which are delivered back with the means."""
        views = [self._views[parameter] for parameter in parameters]
        torch._foreach_copy_([vector for vector, _ in views], gradients)
        self._gradients += gradients
        self._means += [mean for _, mean in views]
        self._deliveries.append(delivery)

    @torch.no_grad()
    def deliver(self, error: Exception | None) -> None:
        """Copy the means into DDP's buckets; NaN after an error, which is raised at the end of backward."""
        gradients, means, deliveries = self._gradients, self._means, self._deliveries
        self._empty()  # first, since the thread that waits goes on to the next iteration
        if error is None:
            torch._foreach_copy_(gradients, means)
        else:
            for gradient in gradients:
                gradient.fill_(float("nan"))
        for delivery in deliveries:
            delivery.arrive()

    def _empty(self) -> None:
        self._gradients: list[Tensor] = []
        self._means: list[Tensor] = []
        self._deliveries: list[Delivery] = []


class GradientVectors:
    """All vectors of a model, in the order in which they were added, and the queue of those in flight.

    With `in_background` the communicator's progress thread averages them while backward goes on.
    """

    def __init__(self, algorithm: AlgorithmChoice, comm: Communicator, in_background: bool) -> None:
        self._algorithm, self._comm, self._in_background = algorithm, comm, in_background
        self.reducers: list[BucketReducer] = []
        self._vectors: list[GradientVector] = []
        self._index_of: dict[Tensor, int] = {}
        self.queue = BucketQueue(self.reducers, comm, in_background=in_background)

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._index_of

    def add(self, members: Sequence[NamedParameter]) -> None:
        """Add a vector for each algorithm among these parameters, which have one dtype."""
        algorithms = algorithms_by_name(self._algorithm, members)
        groups: dict[str, list[NamedParameter]] = {}
        for member in members:
            groups.setdefault(str(algorithms[member.name]), []).append(member)
        for group in groups.values():
            self._open(group, algorithms[group[0].name])

    def like(self, groups: Sequence[Sequence[NamedParameter]]) -> GradientVectors:
        """Return new vectors by the same choice of algorithms, one for each group of parameters."""
        made = GradientVectors(self._algorithm, self._comm, self._in_background)
        for group in groups:
            made._open(group, algorithms_by_name(self._algorithm, group)[group[0].name])
        return made

    @torch.no_grad()
    def push(self, bucket: GradBucket) -> Future[Tensor]:
        """Copy a bucket's gradients, and start the vectors that they complete.

        The future holds the bucket's buffer, once that has the means.
        """
        parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self:
                parameters, gradients = parts.setdefault(self._index_of[parameter], ([], []))
                parameters.append(parameter)
                gradients.append(gradient)
        delivery = Delivery(bucket.buffer(), len(parts))
        for index, (parameters, gradients) in parts.items():
            vector = self._vectors[index]
            vector.copy_in(parameters, gradients, delivery)
            self.queue.push(index, len(parameters), vector.deliver)
        return delivery.future

    def _open(self, members: Sequence[NamedParameter], algorithm: Algorithm) -> None:
        index = len(self.reducers)
        reducer = open_reducer(index, members, algorithm, self._comm)
        reducer.padding_is_zero = True
        self.reducers.append(reducer)
        self._vectors.append(GradientVector(reducer))
        self._index_of |= dict.fromkeys(reducer.parameters, index)
