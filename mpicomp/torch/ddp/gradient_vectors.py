"""The vectors in which the gradients of a DistributedDataParallel travel.

They are filled from DDP's buckets and copied back into these, and do not depend on them: DDP groups its buckets anew
after the first iteration of each process, while a residual belongs to the same parameters all along. A vector begins
when DDP has brought the last gradient of it. DDP brings its buckets in one order on all ranks, so the vectors begin in
one order too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from collectives import Communicator, Handle
from collectives.errors import NonFiniteGradient
from mpicomp.algorithms import Algorithm
from mpicomp.torch.bucket_reducers import BucketReducer, VectorPair
from mpicomp.torch.buckets import ALIGNMENT, NamedParameter, make_bucket
from mpicomp.torch.devices import devices_of
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name


class Delivery:
    """A bucket that DDP waits for.

    Parameters
    ----------
    buffer : Tensor
        The bucket's gradients, which are overwritten with their means.
    vectors : int
        How many vectors bring these.

    Attributes
    ----------
    future : Future
        Has the buffer once all have.
    """

    def __init__(self, buffer: Tensor, vectors: int) -> None:
        self.future: Future[Tensor] = Future(devices=devices_of([buffer]))
        self._buffer, self._missing = buffer, vectors
        if not vectors:
            self.future.set_result(buffer)

    def arrive(self) -> None:
        """Another vector has brought its means."""
        self._missing -= 1
        if not self._missing:
            self.future.set_result(self._buffer)


class GradientVector:
    """A reducer's vector between DDP's buckets.

    Attributes
    ----------
    reducer : BucketReducer
    error : Exception or None
        By which the last averaging ended. The gradients are NaN then.
    """

    def __init__(self, reducer: BucketReducer) -> None:
        self.reducer = reducer
        self.error: Exception | None = None
        views = zip(reducer.vector_views, reducer.mean_views, strict=True)
        self._views = dict(zip(reducer.parameters, views, strict=True))
        self._handle: Handle | None = None
        self._empty()

    def take(self, parameters: list[Tensor], gradients: list[Tensor], delivery: Delivery) -> bool:
        """Copy gradients from a bucket; whether none is missing any more."""
        views = [self._views[parameter] for parameter in parameters]
        torch._foreach_copy_([vector for vector, _ in views], gradients)
        self._gradients += gradients
        self._means += [mean for _, mean in views]
        self._deliveries.append(delivery)
        return len(self._gradients) == len(self._views)

    def average(self, in_background: bool) -> None:
        """Average, and deliver the means; in the background they are delivered by the progress thread.

        An error in a hook would end backward half-way, on one rank alone; it is kept.
        """
        try:
            if in_background:
                self._handle = self.reducer.begin()
                self._handle.then(self._end)
                return
            self.reducer.aggregate()
        except Exception as error:  # noqa: BLE001 - raised after backward
            self.error = error
        self._deliver()

    def wait(self) -> None:
        """Wait for the end, in such a way that signals are handled meanwhile."""
        if self._handle is not None:
            with suppress(Exception):
                self._handle.wait()
            self._handle = None

    def _end(self, handle: Handle) -> None:
        try:
            self.reducer.wait()
        except Exception as error:  # noqa: BLE001 - raised after backward
            self.error = error
        self._deliver()

    @torch.no_grad()
    def _deliver(self) -> None:
        gradients, means, deliveries = self._gradients, self._means, self._deliveries
        self._empty()  # first, as whoever waits goes on to the next iteration
        if self.error is None:
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
    """All vectors of a model, in the order in which they were added.

    Parameters
    ----------
    algorithm : AlgorithmChoice
    comm : Communicator
    """

    def __init__(self, algorithm: AlgorithmChoice, comm: Communicator) -> None:
        self._algorithm, self._comm = algorithm, comm
        self._vectors: list[GradientVector] = []
        self._vector_of: dict[Tensor, GradientVector] = {}
        self._begun = 0

    @property
    def reducers(self) -> list[BucketReducer]:
        """Of each vector."""
        return [vector.reducer for vector in self._vectors]

    @property
    def names(self) -> list[list[str]]:
        """The parameters of each vector."""
        return [[member.name for member in reducer.bucket.members] for reducer in self.reducers]

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._vector_of

    def add(self, members: Sequence[NamedParameter]) -> None:
        """Add a vector for each algorithm among these parameters, which have one dtype."""
        algorithms = algorithms_by_name(self._algorithm, members)
        groups: dict[str, list[NamedParameter]] = {}
        for member in members:
            groups.setdefault(str(algorithms[member.name]), []).append(member)
        for group in groups.values():
            self._open(group, algorithms[group[0].name])

    def of(self, groups: Sequence[Sequence[NamedParameter]]) -> GradientVectors:
        """New vectors by the same choice of algorithms, one for each group of parameters."""
        made = GradientVectors(self._algorithm, self._comm)
        for group in groups:
            made._open(group, algorithms_by_name(self._algorithm, group)[group[0].name])
        return made

    @torch.no_grad()
    def average(self, bucket: GradBucket, in_background: bool) -> Future[Tensor]:
        """Take a bucket's gradients, and begin to average the vectors that they complete.

        Returns
        -------
        Future
            The bucket's buffer, once it holds the means.
        """
        parts: dict[GradientVector, tuple[list[Tensor], list[Tensor]]] = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self:
                parameters, gradients = parts.setdefault(self._vector_of[parameter], ([], []))
                parameters.append(parameter)
                gradients.append(gradient)
        delivery = Delivery(bucket.buffer(), len(parts))
        for vector, (parameters, gradients) in parts.items():
            if vector.take(parameters, gradients, delivery):
                vector.average(in_background)
                self._begun += 1
        return delivery.future

    def end_iteration(self) -> bool:
        """All buckets have come; whether all vectors have begun."""
        begun, self._begun = self._begun, 0
        return begun == len(self._vectors)

    def wait(self) -> None:
        """Wait until all that have begun have ended."""
        for vector in self._vectors:
            vector.wait()

    def take_error(self) -> Exception | None:
        """The first error since the last time, and rather another one than NonFiniteGradient."""
        errors = [vector.error for vector in self._vectors if vector.error is not None]
        for vector in self._vectors:
            vector.error = None
        return min(errors, key=lambda error: isinstance(error, NonFiniteGradient), default=None)

    def _open(self, members: Sequence[NamedParameter], algorithm: Algorithm) -> None:
        bucket = make_bucket(len(self._vectors), members, ALIGNMENT if algorithm.uses_tensor_lengths else 1)
        vector = GradientVector(BucketReducer(bucket, VectorPair(bucket), algorithm, self._comm))
        self._vectors.append(vector)
        self._vector_of |= dict.fromkeys(vector.reducer.parameters, vector)
