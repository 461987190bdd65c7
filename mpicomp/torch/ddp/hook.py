"""Making of a communication hook for DistributedDataParallel, whose state is in `hook_state.py`.

Where the communicator regroups after the death of a rank, DDP must not use its own process group any more. It does so
for its buckets, once; for a map of used parameters with ``find_unused_parameters``, which is refused; and for buffers,
which `BufferBroadcast` copies in its place.
"""
# Annotations are not postponed: DDP compares those of the hook.

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from collectives import Communicator
from collectives.consistency.descriptions import fingerprint
from collectives.execution.uncompiled import keep_uncompiled
from collectives.quoting import shown
from collectives.recovery.fault_tolerance import repeat_after_deaths
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_queue import overlap_by_thread
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.ddp.buffer_broadcast import BufferBroadcast
from mpicomp.torch.ddp.hook_state import FREEZE, DDPHookState
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name, require_algorithm
from mpicomp.torch.parameters import NamedParameter, require_dense_floats, require_own_gradients

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
