"""All-reduce hook for FSDP2: shards inside a node, compressed means of the shards between nodes.

FSDP calls the hook of a module with the output of the module's reduce-scatter, in the middle of backward, and takes the
tensor as the gradient of its shard. Where nothing else happens to the tensor, a thread averages it while backward goes
on, and the mean is written at the end of backward.

An error that is raised within FSDP's own code leaves its modules half-way between two states. Errors are therefore kept
until FSDP has finished the backward; a callback of autograd's that comes after FSDP's then raises them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist

from collectives import Communicator
from collectives.annotations import override
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveMismatch
from collectives.execution.uncompiled import keep_uncompiled
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.aggregator.base import Aggregator
from mpicomp.algorithms import PerNode
from mpicomp.torch.buckets.bucket_queue import overlap_by_thread, worse
from mpicomp.torch.buckets.bucket_reducers import BucketReducer
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.devices import call_after_backward
from mpicomp.torch.front_ends import AlgorithmChoice, NonCopyable, algorithms_by_name, require_algorithm
from mpicomp.torch.fsdp import job_agreement
from mpicomp.torch.fsdp.group_reduction import GroupReduction
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, parameter_groups, require_whole_model
from mpicomp.torch.fsdp.shard_states import ShardStates
from mpicomp.torch.replication import require_same_values

_CALL = "fsdp_hook(algorithm, comm, model)"


class FSDPHook(NonCopyable):
    """State of the hooks of one model's FSDP modules. :func:`mpicomp.torch.fsdp_hook` makes it.

    ``torch.distributed.checkpoint`` saves and loads it like a model: residuals are distributed tensors that go by the
    parameters' names.

    Parameters
    ----------
    algorithm, comm
        As in :func:`mpicomp.torch.fsdp_hook`.
    groups : list of ParameterGroup
        FSDP's parameter groups.
    layout : list of list of int
        Global ranks, a row for each node, in the order of their shards.

    Attributes
    ----------
    comm : Communicator
        The communicator.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from mpicomp.torch import fsdp_hook, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> comm = mpicomp.Communicator()  # here of one rank: a node
    >>> model = fully_shard(torch.nn.Linear(3, 1), mesh=init_device_mesh("cpu", (1,)))
    >>> hook = fsdp_hook(mpicomp.EFSignSGD(), comm, model)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> hook.buckets, hook.aggregators[0].step
    ([['weight', 'bias']], 1)
    >>> hook.load_state_dict(hook.state_dict())
    >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self, algorithm: AlgorithmChoice, comm: Communicator, groups: list[ParameterGroup], layout: list[list[int]]
    ) -> None:
        self.comm = comm
        n_shards, shard = len(layout[0]), layout[comm.rank].index(dist.get_rank())
        numbers = count(shard, n_shards)
        # about in the order of gradients, as DDP numbers its buckets
        self._reductions = [GroupReduction(one, algorithm, comm, partial(next, numbers)) for one in reversed(groups)]
        vectors = [one for each in self._reductions for one in each.vectors]
        described = [one for each in self._reductions for one in each.described]
        self._states = ShardStates(vectors, layout, comm.rank, shard, described)
        self._in_background = comm.size > 1 and overlap_by_thread(comm)
        self._in_flight: list[GroupReduction] = []
        self._error: Exception | None = None
        self._in_backward = self._compared = False
        for reduction in self._reductions:
            group = reduction.group
            group.set_hook(keep_uncompiled(partial(self._average, reduction)))
            # without it the ranks' vectors would lack parameters that had no gradient, maybe others on each node
            group.module.set_reduce_scatter_unused_params(True, recurse=False)

    @property
    def aggregators(self) -> tuple[Aggregator, ...]:
        """One aggregator for each vector that has elements on this rank."""
        return tuple(reducer.aggregator for reducer in self.reducers)

    @property
    @override
    def reducers(self) -> Sequence[BucketReducer]:
        return [vector.reducer for vector in self._states.vectors]

    @property
    def buckets(self) -> list[list[str]]:
        """Names of the parameters whose shards are in each aggregator's vector, in their order."""
        return [vector.reducer.bucket.names for vector in self._states.vectors]

    def remove(self) -> None:
        """Remove the hooks from the model, whose gradients are then averaged within nodes alone."""
        for reduction in self._reductions:
            reduction.group.set_hook(None)

    # States ----------------------------------------------------------------------------------------------------------

    @in_own_mode
    def state_dict(self) -> dict[str, Any]:
        r"""Return the residuals and counters, as ``torch.distributed.checkpoint`` saves them.

        Returns
        -------
        dict
            Copies: distributed tensors of shape [nodes, \*shape of the parameter], named by entry and parameter, such
            as "residual/layer.weight"; scales and counters of each shard; and a description of the vectors.
        """
        return self._states.state_dict()

    @in_own_mode
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a copy of a state of :meth:`state_dict` on equally many nodes and shards; collective.

        Training goes on from it to the bit, also in a new process. ``torch.distributed.checkpoint.load`` calls it.

        Parameters
        ----------
        state : dict
            Not changed.

        Raises
        ------
        ValueError
            The state is of other parameters, of another algorithm, or of other numbers of nodes and shards, or it is
            damaged. Nothing is changed then, on any rank.
        CollectiveMismatch
            Another rank raised ValueError.
        """
        self._load("FSDPHook.load_state_dict", lambda: self._states.checked(state))

    @in_own_mode
    def load_checkpoint(self, checkpoint_id: Any, key: str = "hook") -> None:
        """Load the state in a checkpoint of ``torch.distributed.checkpoint``, also on other nodes; collective.

        With other numbers of nodes or shards, residuals are cut again, and each node starts from the mean of the
        residuals; errors of owners stay with their elements. Scales come from the shard that held a tensor's first row.

        Parameters
        ----------
        checkpoint_id : str or Path
            Folder that ``torch.distributed.checkpoint.save`` wrote.
        key : str
            Name of the hook among the saved objects.

        Raises
        ------
        ValueError
            As :meth:`load_state_dict` raises it, but for the numbers of nodes and shards; or there is no such state.
        CollectiveMismatch
            Another rank raised ValueError.
        """
        call = "FSDPHook.load_checkpoint"
        # before it is read, which is collective
        keys = job_agreement.agreed(call, lambda: self._states.saved_keys(checkpoint_id, key))
        self._load(call, lambda: self._states.read(checkpoint_id, key, keys))

    def _load(self, call: str, read: Callable[[], list[dict[str, Any]]]) -> None:
        states = job_agreement.agreed(call, lambda: self._states.check(read()))
        for aggregator, state in zip(self.aggregators, states, strict=True):
            aggregator.load_state_dict(state)

    # A backward ------------------------------------------------------------------------------------------------------

    def _average(self, reduction: GroupReduction, output: Tensor) -> None:
        """Average the output of a group's reduce-scatter: the hook that FSDP calls."""
        if reduction in self._in_flight:  # a module that was used twice
            self._finish()
        later = self._in_background and reduction.group.may_end_later(output)
        try:
            if isinstance(self._error, ValueError | CollectiveMismatch):
                raise self._error  # other nodes may make no more calls in this backward
            self._check_model()
            if not reduction.begin(output):
                return
        except Exception as error:  # noqa: BLE001 - raised at the end of backward
            self._error = worse(self._error, error)
            output.fill_(float("nan"))
        self._in_flight.append(reduction)
        # which calls `_end` behind FSDP's own callback
        if not call_after_backward(self._end) or not later:
            self._finish()

    @keep_uncompiled
    def _end(self) -> None:
        """Wait for all groups, and raise the first error. Later calls of the same backward find nothing to do."""
        self._finish()
        self._in_backward = False
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for reduction in in_flight:
            self._error = worse(self._error, reduction.finish())

    def _check_model(self) -> None:
        """Raise an error unless FSDP trains the parameters that the hook averages; in the first call of a backward."""
        if self._in_backward:
            return
        self._in_backward = True
        groups = [one.group for one in self._reductions]
        with self.comm.refusing("the gradients of FSDP", ValueError, where=self.comm.here):
            if not self._compared:
                require_whole_model(groups)
            # all groups at once: the other nodes' next call may be of another one than was unfrozen here
            for group in groups:
                group.require_members()
        if not self._compared:
            self._compare_shards()

    def _compare_shards(self) -> None:
        """Compare the shards of all nodes, in the first backward: the model may be loaded after the hook is made."""
        self._compared = True
        shards = {member.name: member.shard for one in self._reductions for member in one.group.members}
        cure = "build the model from the same seed on all ranks, or load the same checkpoint"
        require_same_values(shards, self.comm, cure)


@in_own_mode
def fsdp_hook(algorithm: AlgorithmChoice, comm: Communicator, model: nn.Module) -> FSDPHook:
    """Set hooks by which FSDP2 shards inside each node and averages gradients between nodes in few bits. Collective.

    Shard the model over the ranks of each node by ``fully_shard(module, mesh=mesh["shard"])``. FSDP's reduce-scatter
    then gives each rank the node's mean of its shards, and the hook replaces it by the mean over the nodes. All ranks
    of the default process group make the call, before the first backward.

    Parameters
    ----------
    algorithm : Algorithm, dict of Algorithm, or callable
        One for all parameters, or several, as :class:`DistributedOptimizer` takes them. It receives gradients, also if
        it prefers "updates". Each parameter group of FSDP becomes a vector.
    comm : Communicator
        The ranks that hold equal shards, one of each node, such as ``Communicator().nodes.across``. A thread of the
        process makes all of its calls from now on.
    model : Module
        The module that ``fully_shard`` was called on, and whose modules it was called on.

    Returns
    -------
    FSDPHook
        Has ``state_dict``, ``load_state_dict``, ``load_checkpoint``, ``aggregators``, ``buckets`` and ``remove``.

    Raises
    ------
    ValueError
        The model is not sharded, or over several meshes, or the mesh has a dimension of replicas, which FSDP averages
        itself; the communicator is another one, or regroups after a death; or a hook is set already.
        CollectiveMismatch on the other ranks if they could make the call.
    TypeError
        An argument is something else; CollectiveMismatch on the other ranks.
    CollectiveMismatch
        Another rank raised one of these, or the ranks' algorithms or modules differ.

    Notes
    -----
    ``backward()`` raises the errors of :meth:`mpicomp.Aggregator.aggregate`, on all ranks of `comm`, once FSDP has
    finished. The gradients of the vectors that failed are NaN then.

    References
    ----------
    Zhao et al., "PyTorch FSDP", VLDB 2023, arXiv 2304.11277, section 3.2.2, hybrid sharding.

    Examples
    --------
    >>> import torch
    >>> import mpicomp
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from mpicomp.torch import fsdp_hook, register_backend
    >>> register_backend()
    >>> torch.distributed.init_process_group("mpicomp")
    >>> world = mpicomp.Communicator()
    >>> nodes = world.nodes
    >>> shape = (len(nodes.sizes), nodes.local.size)
    >>> mesh = init_device_mesh("cpu", shape, mesh_dim_names=("node", "shard"))
    >>> model = fully_shard(torch.nn.Linear(3, 1), mesh=mesh["shard"])
    >>> hook = fsdp_hook(mpicomp.Marsit(), nodes.across, model)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> model(torch.ones(2, 3)).square().mean().backward()
    >>> optimizer.step()
    >>> torch.distributed.destroy_process_group()
    """
    job_agreement.require_process_group("fsdp_hook")
    groups: list[ParameterGroup] = []
    problem: Exception | None = None
    arguments = ""
    try:
        # an instance alone: errors of communicators notify its ranks, which `agree` does here
        if not isinstance(comm, Communicator):
            require_communicator(comm, "fsdp_hook", _CALL)
        require_algorithm(algorithm)
        if comm.recovery is not None:
            raise ValueError(
                "the communicator has on_failure='regroup', and FSDP cannot go on without the shards of a dead rank; "
                "pass one with on_failure='raise', and start again from the last checkpoint after a death"
            )
        groups = parameter_groups(model)
        _require_hookable(groups)
        require_whole_model(groups)
        arguments = _described(algorithm, groups)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    job_agreement.agree(problem, "fsdp_hook", arguments)
    layout = _agree_on_layout(groups[0], comm)
    return FSDPHook(algorithm, comm, groups, layout)


def _described(algorithm: AlgorithmChoice, groups: list[ParameterGroup]) -> str:
    """Return algorithms and parameters as text, which the ranks compare."""
    chosen = [algorithms_by_name(algorithm, group.placeholders) for group in groups]
    whole = [
        (group.name, [(one.name, *one.shape, one.dim, str(by[one.name])) for one in group.members], str(group.dtype))
        for group, by in zip(groups, chosen, strict=True)
    ]
    per_node = next((one for by in chosen for one in by.values() if isinstance(one, PerNode)), None)
    if per_node is not None:
        raise ValueError(
            f"{per_node} sums within nodes, which FSDP's reduce-scatter has done already; pass {per_node.algorithm}"
        )
    different = sorted({str(one) for by in chosen for one in by.values()})
    n = sum(len(group.members) for group in groups)
    where = ", ".join(sorted({group.device.type for group in groups if group.members}))
    return f"{', '.join(different)} for {n} parameters on {where} in {len(groups)} groups ({fingerprint(str(whole)):x})"


def _require_hookable(groups: list[ParameterGroup]) -> None:
    for group in groups:
        if group.members and group.averages_replicas:
            raise ValueError(
                f"{group.title} is sharded over a mesh of two dimensions, over the first of which FSDP averages in "
                'full precision before it calls the hook; pass fully_shard the dimension of shards: mesh=mesh["shard"]'
            )
        if group.has_hook:
            raise ValueError(f"{group.title} has an all-reduce hook already; remove it, or make one hook per model")


def _agree_on_layout(group: ParameterGroup, comm: Communicator) -> list[list[int]]:
    """Return the global ranks of each node, in the order of shards; ValueError on all ranks unless `comm` fits."""
    across = tuple(comm.allgather_object(dist.get_rank()))
    everywhere = job_agreement.gather((group.ranks, across))
    for rank in range(len(everywhere)):
        problem = _layout_problem(rank, everywhere)
        if problem:
            raise ValueError(f"{job_agreement.here()}, fsdp_hook: {problem}")
    return [list(everywhere[rank][0]) for rank in across]


def _layout_problem(rank: int, everywhere: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Return the reason for which a rank's communicator does not join equal shards of different nodes, or "".

    `everywhere` has the ranks of each rank's node, and those of its communicator.
    """
    cure = (
        "pass the communicator of ranks that hold equal shards, one of each node, such as Communicator().nodes.across"
    )
    own, across = everywhere[rank]
    shard = own.index(rank)
    nodes = [everywhere[one][0] for one in across]
    for one, node in zip(across, nodes, strict=True):
        if len(node) != len(own):
            return (
                f"rank {rank} shares its shards with {len(own)} ranks, and rank {one} of its communicator with "
                f"{len(node)}; nodes must have equal numbers of ranks"
            )
        if node.index(one) != shard:
            return f"the communicator of rank {rank}, which holds shard {shard}, has rank {one}, which does not; {cure}"
    if len(set(nodes)) < len(nodes):
        return f"the communicator of rank {rank} has several ranks of one FSDP group, {list(across)}; {cure}"
    for i, other in enumerate(own):
        if everywhere[other][1] != tuple(node[i] for node in nodes):
            return f"the communicators of ranks {rank} and {other}, of one node, join other nodes; {cure}"
    n_groups = len({ranks for ranks, _ in everywhere})
    if n_groups != len(nodes):
        # the gradients of the other groups would never meet these
        return (
            f"the mesh has {n_groups} groups of {len(own)} ranks, of which the communicator of rank {rank} joins "
            f"{len(nodes)}: the mesh does not match the nodes; make it of shape (len(nodes.sizes), nodes.local.size), "
            "and pass nodes.across, of nodes = Communicator().nodes"
        )
    return ""
