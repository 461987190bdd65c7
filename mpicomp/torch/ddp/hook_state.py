"""State of DistributedDataParallel's hook: DDP keeps its buckets and its overlap, our methods average.

DDP regroups its buckets after the first iteration (with ``static_graph`` after the second, and with
``find_unused_parameters`` never), which only the buckets show. Until then, and for two iterations at most, gradients
are averaged in full precision. Then the vectors of the methods are laid out like DDP's buckets, for good.

DDP cannot hand an error on: it would take it for a gradient. So errors are kept until DDP has done with the iteration.
A callback of autograd's that comes after DDP's then raises them, at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator, PeerFailure
from collectives.annotations import override
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import list_ranks
from mpicomp.algorithms import Dense
from mpicomp.torch.buckets.bucket_layout import members_by_name
from mpicomp.torch.buckets.bucket_reducer import BucketReducer
from mpicomp.torch.ddp.gradient_vectors import GradientVectors
from mpicomp.torch.devices import call_after_backward
from mpicomp.torch.front_ends import AlgorithmChoice
from mpicomp.torch.non_copyable import NonCopyable
from mpicomp.torch.parameters import NamedParameter, require_dense_floats
from mpicomp.torch.state.rank_state import StateOwner, require_aggregators
from mpicomp.torch.state.schema import DDP_HOOK, State

MOST_DENSE = 2  # iterations after which DDP has regrouped its buckets if it ever does
FREEZE = "freeze it before wrapping the model"


class DDPHookState(NonCopyable, StateOwner):
    """State of one DistributedDataParallel's hook, which averages its buckets. :func:`mpicomp.torch.ddp_hook` makes it.

    Parameters
    ----------
    algorithm, comm
        As in :func:`mpicomp.torch.ddp_hook`.
    members : sequence of NamedParameter
        Parameters whose gradients are averaged; empty without the model.
    in_background : bool
        The progress thread makes the calls.
    frozen : sequence of NamedParameter
        Parameters that DDP does not average, as they required no gradient when the model was wrapped.
    own_iterations : int
        First iterations in which a rank must not die, as DDP forms its buckets after them over its process group.

    Attributes
    ----------
    comm : Communicator
        The communicator.
    aggregators : tuple of Aggregator
        One per vector; none before the vectors are laid out.
    iterations : int
        Iterations whose gradients were averaged.

    Notes
    -----
    States go by the parameters' names: without a model they have no names, a ValueError. A state that was saved
    before the vectors are laid out has no residuals: a hook that loads it starts from scratch. A state may lack
    parameters of the model: these get vectors of their own, which start from scratch, and the others go on exactly.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import ddp_hook, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    >>> state, hook = ddp_hook(mpicomp.QSGD(), mpicomp.Communicator(), model)
    >>> model.register_comm_hook(state, hook)
    >>> for step in range(3):
    ...     model(torch.ones(2, 3)).sum().backward()
    >>> saved = state.state_dict()  # one for each rank, next to the model's and the optimizer's
    >>> state.check_state_dict(saved)
    >>> state.load_state_dict(saved)
    >>> state.iterations, sorted(state.buckets[0]), state.aggregators[0].step
    (3, ['bias', 'weight'], 2)
    >>> torch.distributed.destroy_process_group()
    """

    state_schema = DDP_HOOK
    loads = "restoring a DDP hook"

    def __init__(
        self,
        algorithm: AlgorithmChoice,
        comm: Communicator,
        members: Sequence[NamedParameter],
        in_background: bool,
        frozen: Sequence[NamedParameter] = (),
        own_iterations: int = 0,
    ) -> None:
        self.comm = comm
        self._own_iterations, self._members_before = own_iterations, comm.members
        self.iterations = 0
        self._seen_iterations = 0  # of this hook, while `iterations` goes on from a state
        self._members, self._frozen = members, frozen
        self._names = {member.parameter: member.name for member in members}
        self._all_named = bool(members)
        self._vectors = GradientVectors(algorithm, comm, in_background)
        self._in_background = in_background
        self._dense: GradientVectors | None = self._dense_vectors()  # until DDP's buckets are there for good
        self._first_bucket: list[int] = []
        self._next_index = 0

    @property
    @override
    def reducers(self) -> Sequence[BucketReducer]:
        return self._vectors.reducers

    @property
    def buckets(self) -> list[list[str]]:
        """The names of the parameters in each aggregator's vector, in their order."""
        return [reducer.bucket.names for reducer in self._vectors.reducers]

    def average(self, bucket: GradBucket) -> Future[Tensor]:
        """Begin to average the gradients of a bucket of DDP's.

        Parameters
        ----------
        bucket : GradBucket

        Returns
        -------
        Future of Tensor
            Completes with the averaged gradients.

        Raises
        ------
        RuntimeError
            The bucket is another model's.
        ValueError
            Its gradients cannot be averaged, or a parameter was unfrozen after the model was wrapped.
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

    @override
    def own_entries(self) -> State:
        self._require_names()
        return {"iterations": self.iterations, "buckets": self.buckets}

    @override
    def _checked(self, state: object) -> State:
        self._require_names()
        return super()._checked(state)

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

    def _vectors_like(self, buckets: list[list[str]]) -> GradientVectors:
        # the state of an earlier hook lacks the parameters that were unfrozen before the model was wrapped again
        return self._vectors.like(members_by_name(buckets, (), "this model", self._members))

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
                "state with one model, and if an error ended the last backward, make model and hook again"
            )
        if bucket.buffer().layout != torch.strided:
            names = " and ".join(repr(self._names.get(one, "?")) for one in bucket.parameters())
            raise ValueError(
                f"{self.comm.here}: the gradient of {names} is sparse, which cannot be averaged element by element; "
                "build its layer with sparse=False"
            )

    def _begin_iteration(self, bucket: GradBucket) -> None:
        self._raise_error()  # not raised yet if DDP called the hook outside of backward
        for member in self._frozen:
            if member.parameter.requires_grad:
                raise ValueError(
                    f"{self.comm.here}: parameter {member.name!r} was frozen when the model was wrapped in "
                    "DistributedDataParallel, which does not average it: wrap the module again, make another ddp_hook, "
                    "and load this one's state_dict() into it, which keeps the residuals"
                )
        if self._dense is not None:
            before, self._first_bucket = self._first_bucket, [id(parameter) for parameter in bucket.parameters()]
            if self.iterations == MOST_DENSE or (before and before != self._first_bucket):
                self._dense = None
        self.iterations += 1
        self._seen_iterations += 1

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
        if vectors.queue.n_started < len(vectors.reducers):
            raise RuntimeError(
                f"{self.comm.here}: DDP has not brought the gradients of all parameters that the state has; load "
                "one of a model of which the same parameters are trained"
            )

        @keep_uncompiled
        def before_ddp_waits() -> None:
            vectors.queue.wait()
            call_after_backward(self._end_backward)

        call_after_backward(before_ddp_waits)  # a rank that has left DDP's join() is not in backward

    @keep_uncompiled
    def _raise_error(self) -> None:
        error = (self._vectors if self._dense is None else self._dense).queue.take_failure()
        if error is not None:
            raise error

    @keep_uncompiled
    def _end_backward(self) -> None:
        self._raise_error()
        if self._seen_iterations <= self._own_iterations:
            self._require_all_ranks()

    @keep_uncompiled
    def before_forward(self, model: DistributedDataParallel, inputs: object) -> None:
        """Raise PeerFailure on all survivors if a rank has died before this forward, in which DDP forms its buckets."""
        forms_buckets = torch.is_grad_enabled() and model.require_backward_grad_sync
        if forms_buckets and self._seen_iterations == self._own_iterations:
            self.comm.barrier()  # where survivors notice a death
            self._require_all_ranks()

    def _require_all_ranks(self) -> None:
        before = self._members_before
        lost = sorted(set(before) - set(self.comm.members))
        if lost:
            raise PeerFailure(
                f"{self.comm.here}, rank {self.comm.members[self.comm.rank]} of {len(before)} before: "
                f"{list_ranks(lost)} died in iteration {self._seen_iterations}, and DistributedDataParallel forms its "
                f"buckets over its process group after iteration {self._own_iterations}: start again from the last "
                "checkpoint"
            )
