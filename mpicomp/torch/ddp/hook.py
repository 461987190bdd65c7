"""A communication hook for DistributedDataParallel: DDP keeps its buckets and its overlap, our methods average."""
# Annotations are not postponed: DDP compares those of the hook.

from collections.abc import Callable

from torch import Tensor
from torch import distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from collectives import Communicator
from collectives.compiling import keep_uncompiled
from collectives.consistency.call_check import fingerprint
from collectives.quoting import shown
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.bucket_queue import overlap_by_thread
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.ddp.gradient_vectors import GradBucket
from mpicomp.torch.ddp.hook_state import FREEZE, DDPHookState
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name, require_algorithm
from mpicomp.torch.parameters import require_dense_floats

Hook = Callable[[DDPHookState, GradBucket], Future[Tensor]]


@keep_uncompiled
def ddp_hook(
    algorithm: AlgorithmChoice, comm: Communicator, model: DistributedDataParallel | None = None
) -> tuple[DDPHookState, Hook]:
    """Return a state and a communication hook, with which a DistributedDataParallel averages its gradients. Collective.

    Register them by ``model.register_comm_hook(state, hook)``, each on one model. Every rank of DDP's process group
    makes the same call. Gradients are averaged during backward; where MPI has no MPI_THREAD_MULTIPLE, backward waits
    for each bucket.

    Parameters
    ----------
    algorithm
        One for all parameters; or several, as :class:`DistributedOptimizer` takes them: by patterns of names, or by a
        function of name and parameter. Parameters of one DDP bucket with different algorithms have vectors of their
        own. Algorithms that prefer "updates", such as Marsit, are given gradients.
    comm
        Of the same ranks in the same order as DDP's process group. A thread of the process makes all of its calls from
        now on.
    model
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
        reached, the model has a hook already, or names are needed and there is no model. The other ranks raise
        CollectiveMismatch.
    TypeError
        The model is no DistributedDataParallel, or another argument is something else.
    CollectiveMismatch
        Another rank raised one of these, or the ranks' process groups differ.

    Notes
    -----
    The first iteration is averaged in full precision, since DDP regroups its buckets after it; so is the second one
    where the first bucket does not show that DDP has done so. Residuals and counters of steps begin after that.

    ``backward()`` raises the errors of :meth:`mpicomp.Aggregator.aggregate`, on all ranks. The gradients of the vectors
    that failed are NaN then, on all ranks, and training can go on after ``NonFiniteGradient``. So with a
    ``torch.amp.GradScaler`` catch it around ``backward()``: the scaler then skips the step on all ranks.
    """
    require_communicator(comm, "ddp_hook", "ddp_hook(algorithm, comm, model)", algorithm, model)
    try:
        require_algorithm(algorithm)
        group = _group_of(model, comm)
        members = [] if model is None else _members_of(model)
        if model is None and not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"the algorithm is {shown(algorithm)}; pass an instance, or for choices by parameters' names also the "
                "model: ddp_hook(algorithm, comm, model)"
            )
        algorithms_by_name(algorithm, members)
        in_background = comm.size > 1 and overlap_by_thread(comm)
    except (ValueError, TypeError, RuntimeError) as error:
        comm.reject(type(error)(f"{comm.here}: {error}"), "making a DDP hook")
    ranks = dist.get_process_group_ranks(group)
    comm.agree(fingerprint(f"ddp_hook {ranks}"), lambda: f"ddp_hook for a process group of ranks {shown(ranks)}")
    return DDPHookState(algorithm, comm, members, in_background), average_bucket


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


def _members_of(model: DistributedDataParallel) -> list[NamedParameter]:
    """Return the parameters whose gradients DDP averages."""
    members = []
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.numel() and name not in model.parameters_to_ignore:
            require_dense_floats(name, parameter, FREEZE)
            members.append(NamedParameter(name, parameter))
    return members
