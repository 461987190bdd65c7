"""A communication hook for DistributedDataParallel: DDP keeps its buckets and its overlap, our methods average.

DDP regroups its buckets after the first iteration (with ``static_graph`` after the second, and with
``find_unused_parameters`` never), which only the buckets show. Until then, and for two iterations at most, gradients
are averaged in full precision. Then the vectors of the methods are laid out like DDP's buckets, for good.

DDP cannot hand an error on: it would take it for a gradient. So errors are kept until DDP has done with the iteration.
A callback of autograd's that comes after DDP's then raises them, at the end of backward.

Where the communicator regroups after the death of a rank, DDP must not use its own process group any more. It does so
for its buckets, once; for a map of used parameters with ``find_unused_parameters``, which is refused; and for buffers,
which `BufferBroadcast` copies in its place.
"""
# Annotations are not postponed: DDP compares those of the hook.

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from collectives import Communicator, PeerFailure
from collectives.annotations import override
from collectives.consistency.descriptions import fingerprint
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import list_ranks, shown
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import Algorithm, Dense
from mpicomp.torch.buckets.bucket_layout import NamedParameter
from mpicomp.torch.buckets.bucket_queue import overlap_by_thread
from mpicomp.torch.buckets.bucket_reducers import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.ddp.buffer_broadcast import BufferBroadcast
from mpicomp.torch.ddp.gradient_vectors import GradientVectors
from mpicomp.torch.devices import call_after_backward
from mpicomp.torch.front_ends import AlgorithmChoice, NonCopyable, algorithms_by_name, require_algorithm
from mpicomp.torch.parameters import require_dense_floats, require_own_gradients
from mpicomp.torch.state.rank_state import StateOwner, require_aggregators
from mpicomp.torch.state.schema import DDP_HOOK, State, members_by_name

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
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator per vector; none before the vectors are laid out."""
        return tuple(reducer.aggregator for reducer in self.reducers)

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


Hook = Callable[[DDPHookState, GradBucket], Future[Tensor]]


@in_own_mode
def ddp_hook(
    algorithm: AlgorithmChoice, comm: Communicator, model: DistributedDataParallel | None = None
) -> tuple[DDPHookState, Hook]:
    """Return a state and a communication hook, with which a DistributedDataParallel averages its gradients. Collective.

    Register them by ``model.register_comm_hook(state, hook)``, each on one model. Every rank of DDP's process group
    makes the same call. Gradients are averaged during backward; where MPI has no MPI_THREAD_MULTIPLE, backward waits
    for each bucket.

    Parameters
    ----------
    algorithm : Algorithm, dict of Algorithm, or callable
        One for all parameters; or several, as :class:`DistributedOptimizer` takes them: by patterns of names, or by a
        function of name and parameter. Parameters of one DDP bucket with different algorithms have vectors of their
        own. Algorithms that prefer "updates", such as Marsit, are given gradients.
    comm : Communicator
        Of the same ranks in the same order as DDP's process group. A thread of the process makes all of its calls from
        now on.
    model : DistributedDataParallel, optional
        The DistributedDataParallel. It brings the names for states, for errors and for choices of algorithms, and its
        process group, which is otherwise the default one.

    Returns
    -------
    state : DDPHookState
        Has ``state_dict``, ``load_state_dict``, ``aggregators`` and ``buckets``.
    hook : callable

    Raises
    ------
    ValueError
        The communicator's ranks are not those of the process group, a parameter is no floating-point tensor that can be
        reached, the model has a hook already, or names are needed and there is no model. The communicator regroups,
        and DDP needs its process group in each iteration. The other ranks raise CollectiveMismatch.
    TypeError
        The model is no DistributedDataParallel, or another argument is something else.
    CollectiveMismatch
        Another rank raised one of these, or the ranks' process groups differ.

    Notes
    -----
    DDP averages the parameters that required a gradient when the model was wrapped. To unfreeze others while training,
    wrap the module again, make another hook on all ranks, and load the earlier one's state: ``backward()`` raises
    ValueError for a parameter that was unfrozen without that.

    The first iteration is averaged in full precision, since DDP regroups its buckets after it; so is the second one
    where the first bucket does not show that DDP has done so. Residuals and counters of steps begin after that.

    With ``Communicator(on_failure="regroup")`` training goes on after the death of a rank. The hook then copies the
    model's buffers before each forward, in DDP's place, whose process group is not used after the first iteration.

    ``backward()`` raises the errors of :meth:`mpicomp.Aggregator.aggregate`, on all ranks. The gradients of the vectors
    that failed are NaN then, on all ranks, and training can go on after ``NonFiniteGradient``. So with a
    ``torch.amp.GradScaler`` catch it around ``backward()``: the scaler then skips the step on all ranks.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from mpicomp.torch import ddp_hook, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    >>> state, hook = ddp_hook(mpicomp.algorithm("power-sgd"), mpicomp.Communicator(), model)
    >>> model.register_comm_hook(state, hook)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.ones(2, 3)).square().mean().backward()
    >>> optimizer.step()
    >>> torch.distributed.destroy_process_group()
    """
    require_communicator(comm, "ddp_hook", "ddp_hook(algorithm, comm, model)", algorithm, model)
    with comm.refusing("making a DDP hook", ValueError, TypeError, RuntimeError, where=comm.here):
        require_algorithm(algorithm)
        group = _group_of(model, comm)
        members, frozen = ([], []) if model is None else _members_of(model)
        if model is None and not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"the algorithm is {shown(algorithm)}; pass an instance, or for choices by parameters' names also the "
                "model: ddp_hook(algorithm, comm, model)"
            )
        whole = algorithm.of_gradients() if isinstance(algorithm, Algorithm) else algorithm
        algorithms = [*algorithms_by_name(algorithm, members).values(), whole]
        if comm.recovery is not None:
            _require_survivable(model)
        in_background = comm.size > 1 and overlap_by_thread(comm)
    ranks = dist.get_process_group_ranks(group)
    comm.agree(fingerprint(f"ddp_hook {ranks}"), lambda: f"ddp_hook for a process group of ranks {shown(ranks)}")
    for one in dict.fromkeys(one for one in algorithms if isinstance(one, Algorithm)):
        repeat_after_deaths(partial(one.connect, comm))
    own_iterations = 0
    if comm.recovery is not None and model is not None:
        own_iterations = 2 if model.static_graph else 1
        buffers = BufferBroadcast(comm)
        model._register_buffer_comm_hook(buffers, BufferBroadcast.run, _BufferCommHookLocation.PRE_FORWARD)
    state = DDPHookState(algorithm, comm, members, in_background, frozen, own_iterations)
    if own_iterations and model is not None:
        model.register_forward_pre_hook(state.before_forward)
    return state, average_bucket


@keep_uncompiled
def average_bucket(state: DDPHookState, bucket: GradBucket) -> Future[Tensor]:
    """Begin to average a bucket's gradients: the hook that DDP calls."""
    if isinstance(bucket, tuple):
        raise RuntimeError(
            f"{state.comm.here}: PyTorch gives the hook one gradient at a time instead of buckets, as its setting "
            'torch._dynamo.config.optimize_ddp is "python_reducer": leave it at True, or compile without DDP\'s hook'
        )
    return state.average(bucket)


def with_seed(choice: AlgorithmChoice, place: int) -> AlgorithmChoice:
    """Return the choice with seeds that are larger by `place`: models of one communicator draw other numbers."""
    if place == 0:
        return choice
    if isinstance(choice, Mapping):
        return {pattern: _seeded(algorithm, place) for pattern, algorithm in choice.items()}
    if isinstance(choice, Algorithm):
        return _seeded(choice, place)
    return lambda name, parameter: _seeded(choice(name, parameter), place)


def _seeded(algorithm: Algorithm, place: int) -> Algorithm:
    if not is_dataclass(algorithm):
        return algorithm
    changed: dict[str, Any] = {}
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if field.name == "seed":
            changed["seed"] = value + place
        elif isinstance(value, Algorithm):  # that `Auto` switches to
            changed[field.name] = _seeded(value, place)
    return replace(algorithm, **changed)


def _group_of(model: DistributedDataParallel | None, comm: Communicator) -> dist.ProcessGroup:
    """Return DDP's process group, whose ranks must be those of the communicator."""
    if model is not None and not isinstance(model, DistributedDataParallel):
        raise TypeError(f"the model is a {type(model).__name__}; wrap it in DistributedDataParallel first")
    if getattr(model, "_comm_hooks", ()):
        raise ValueError("the model has a communication hook already, and DDP takes one")
    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group; call torch.distributed.init_process_group() first")
    group: dist.ProcessGroup = dist.distributed_c10d._get_default_group() if model is None else model.process_group
    here, there = (comm.rank, comm.size), (dist.get_rank(group), dist.get_world_size(group))
    if here != there:
        raise ValueError(
            f"this is rank {there[0]} of {there[1]} in DDP's process group; give ddp_hook a communicator of the same "
            "ranks in the same order, such as comm.split(0, key=torch.distributed.get_rank())"
        )
    return group


def _require_survivable(model: DistributedDataParallel | None) -> None:
    """Raise ValueError unless DDP can do without its process group after the death of a rank."""
    given = "the communicator has on_failure='regroup'"
    if model is None:
        raise ValueError(
            f"{given}, and DDP's process group does not outlive its ranks; pass the model, whose buffers the hook then "
            "copies: ddp_hook(algorithm, comm, model)"
        )
    if model.find_unused_parameters and not model.static_graph:
        raise ValueError(
            f"{given}, and with find_unused_parameters=True DDP sums over its process group in each iteration, which "
            "does not outlive its ranks; leave it out, pass static_graph=True, or train with DistributedOptimizer"
        )
    if hasattr(model, "buffer_hook"):
        raise ValueError(f"{given}, and the model has a hook for its buffers already; wrap the module again without it")


def _members_of(model: DistributedDataParallel) -> tuple[list[NamedParameter], list[NamedParameter]]:
    """Return the parameters whose gradients DDP averages, and the frozen ones."""
    members: list[NamedParameter] = []
    frozen: list[NamedParameter] = []
    for name, parameter in model.module.named_parameters():
        if not parameter.numel() or name in model.parameters_to_ignore:
            continue
        if parameter.requires_grad:
            require_dense_floats(name, parameter, FREEZE)
            require_own_gradients(name, parameter, "")
        (members if parameter.requires_grad else frozen).append(NamedParameter(name, parameter))
    return members, frozen
