"""State of a hook for DistributedDataParallel between iterations.

DDP regroups its buckets after the first iteration (with ``static_graph`` after the second, and with
``find_unused_parameters`` never), which only the buckets show. Until then, and for two iterations at most, gradients
are averaged in full precision. Then the vectors of the methods are laid out like DDP's buckets, for good.

DDP cannot hand an error on: it would take it for a gradient. So errors are kept until DDP has done with the iteration.
A callback of autograd's that comes after DDP's then raises them, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.futures import Future

from collectives import Communicator
from collectives.annotations import override
from collectives.compiling import keep_uncompiled
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Dense
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.ddp.gradient_vectors import GradBucket, GradientVectors
from mpicomp.torch.front_ends import AlgorithmChoice, NonCopyable
from mpicomp.torch.parameters import require_dense_floats
from mpicomp.torch.state.rank_state import StateOwner, require_aggregators
from mpicomp.torch.state.schema import DDP_HOOK, State, members_by_name

MOST_DENSE = 2  # iterations after which DDP has regrouped its buckets if it ever does
FREEZE = "freeze it before wrapping the model"


class DDPHookState(NonCopyable, StateOwner):
    """Averages the buckets of one DistributedDataParallel; :func:`mpicomp.torch.ddp_hook` makes it.

    Attributes
    ----------
    comm : Communicator
    iterations : int
        Iterations whose gradients were averaged.
    """

    state_schema = DDP_HOOK
    loads = "restoring a DDP hook"

    def __init__(
        self, algorithm: AlgorithmChoice, comm: Communicator, members: Sequence[NamedParameter], in_background: bool
    ) -> None:
        self.comm = comm
        self.iterations = 0
        self._members = members
        self._names = {member.parameter: member.name for member in members}
        self._all_named = bool(members)
        self._vectors = GradientVectors(algorithm, comm, in_background)
        self._in_background = in_background
        self._dense: GradientVectors | None = self._dense_vectors()  # until DDP's buckets are there for good
        self._first_bucket: list[int] = []
        self._next_index = 0

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator per vector; none before the vectors are laid out."""
        return tuple(reducer.aggregator for reducer in self._vectors.reducers)

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each aggregator's vector, in their order."""
        return self._vectors.names

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average the gradients of a bucket of DDP's.

        Raises
        ------
        RuntimeError
            The bucket is another model's.
        ValueError
            Its gradients cannot be averaged.
        """
        self._check_turn(bucket)
        if bucket.index() == 0:
            self._begin_iteration(bucket)
        vectors = self._vectors if self._dense is None else self._dense
        new = [one for one in bucket.parameters() if one.numel() and one not in vectors]
        if new:
            vectors.add([self._member(parameter) for parameter in new])
        future = vectors.push(bucket)
        if bucket.is_last():
            self._end_iteration(vectors)
        return future

    @keep_uncompiled
    def state_dict(self) -> State:
        """Return this rank's residuals and counters, by the parameters' names: tensors and numbers.

        :func:`mpicomp.torch.redistribute_states` makes those for another number of ranks. A state that was
        saved before the vectors are laid out has no residuals: a hook that loads it starts from scratch.

        Raises
        ------
        ValueError
            The hook was made without the model, so that there are no names.
        """
        return self.save_state()

    @keep_uncompiled
    def check_state_dict(self, state: State) -> None:
        """Check a state that is not to be loaded yet; not collective.

        Raises
        ------
        ValueError
            As `load_state_dict` would on this rank.
        """
        self.check_state(state)

    @keep_uncompiled
    def load_state_dict(self, state: State) -> None:
        """Restore a state of :meth:`state_dict`, on the same rank of as many ranks, between iterations; collective.

        The next iteration goes on from it to the bit, also the first one of a new process.

        Raises
        ------
        ValueError
            The state was not made by a hook of these algorithms for this model, or it is damaged. Nothing is changed
            then, on any rank; the other ranks raise CollectiveMismatch.
        CollectiveMismatch
            Another rank raised ValueError, or the ranks' states are of different iterations.
        """
        self.load_state(state)

    @override
    def own_entries(self) -> State:
        self._require_names()
        return {"iterations": self.iterations, "buckets": self.buckets}

    @override
    def check_state(self, state: object) -> State:
        self._require_names()
        return super().check_state(state)

    @override
    def check_own(self, own: State) -> None:
        with self.comm.tags_unused():
            require_aggregators(own, [one.aggregator for one in self._vectors_like(own["buckets"]).reducers])

    @override
    def restored_point(self, own: State) -> str:
        return f"after {own['iterations']} iterations"

    @override
    def load_own(self, own: State) -> None:
        buckets = own["buckets"]
        self._vectors = self._vectors_like(buckets)
        self._dense = None if buckets else self._dense_vectors()
        self.iterations = own["iterations"] if buckets else 0

    @override
    def wrapped_state(self) -> State:
        return {}

    @override
    def load_wrapped(self, state: State) -> None:
        pass

    def _vectors_like(self, buckets: list[list[str]]) -> GradientVectors:
        return self._vectors.like(members_by_name(buckets, self._members, "this model"))

    def _dense_vectors(self) -> GradientVectors:
        return GradientVectors(Dense(), self.comm, self._in_background)

    def _require_names(self) -> None:
        if not self._members:
            raise ValueError("states go by the parameters' names; pass the model: ddp_hook(algorithm, comm, model)")

    # An iteration ----------------------------------------------------------------------------------------------------

    def _check_turn(self, bucket: GradBucket) -> None:
        """Raise an error unless DDP brings its buckets one after the other, of one model."""
        expected, self._next_index = self._next_index, 0 if bucket.is_last() else bucket.index() + 1
        if bucket.index() != expected:
            raise RuntimeError(
                f"{self.comm.here}: DDP brought bucket {bucket.index()} where bucket {expected} was due; register a "
                "state with one model, and if an error ended the last backward, make model and hook anew"
            )
        if bucket.buffer().layout != torch.strided:
            names = " and ".join(repr(self._names.get(one, "?")) for one in bucket.parameters())
            raise ValueError(
                f"{self.comm.here}: the gradient of {names} is sparse, which cannot be averaged element by element; "
                "build its layer with sparse=False"
            )

    def _begin_iteration(self, bucket: GradBucket) -> None:
        self._raise_error()  # not raised yet if DDP called the hook outside of backward
        if self._dense is not None:
            before, self._first_bucket = self._first_bucket, [id(parameter) for parameter in bucket.parameters()]
            if self.iterations == MOST_DENSE or (before and before != self._first_bucket):
                self._dense = None
        self.iterations += 1

    def _member(self, parameter: Tensor) -> NamedParameter:
        """Return a parameter that has no vector yet; without the model, those of the first iteration are numbered."""
        if parameter not in self._names:
            if self._all_named:
                raise RuntimeError(
                    f"{self.comm.here}: DDP brought a gradient of another model; call ddp_hook once for each model"
                )
            name = f"parameter {len(self._names)}"
            require_dense_floats(name, parameter, FREEZE)
            self._names[parameter] = name
        return NamedParameter(self._names[parameter], parameter)

    def _end_iteration(self, vectors: GradientVectors) -> None:
        self._all_named = True
        if not vectors.all_started:
            raise RuntimeError(
                f"{self.comm.here}: DDP has not brought the gradients of all parameters that the state has; load "
                "one of a model of which the same parameters are trained"
            )
        queue: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

        @keep_uncompiled
        def before_ddp_waits() -> None:
            vectors.queue.wait()
            queue(self._raise_error)

        with suppress(RuntimeError):  # a rank that has left DDP's join() is not in backward
            queue(before_ddp_waits)

    @keep_uncompiled
    def _raise_error(self) -> None:
        error = (self._vectors if self._dense is None else self._dense).queue.take_failure()
        if error is not None:
            raise error
