"""Making of the hooks of a model: checks of the arguments, and the ranks' agreement on them and on their nodes."""

from __future__ import annotations

from functools import partial

from torch import distributed as dist
from torch import nn

from collectives import Communicator
from collectives.consistency.descriptions import fingerprint
from mpicomp.aggregator.arguments import require_communicator
from mpicomp.algorithms import PerNode
from mpicomp.torch.caller_modes import in_own_mode
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name, require_algorithm
from mpicomp.torch.fsdp import job_agreement
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, parameter_groups, require_whole_model
from mpicomp.torch.fsdp.shard_hook import FSDPHook


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

    def check() -> list[ParameterGroup]:
        # an instance alone: errors of communicators notify its ranks, which `agreed` does here
        if not isinstance(comm, Communicator):
            require_communicator(comm, "fsdp_hook", "fsdp_hook(algorithm, comm, model)")
        require_algorithm(algorithm)
        if comm.recovery is not None:
            raise ValueError(
                "the communicator has on_failure='regroup', and FSDP cannot go on without the shards of a dead rank; "
                "pass one with on_failure='raise', and start again from the last checkpoint after a death"
            )
        groups = parameter_groups(model)
        _require_hookable(groups)
        require_whole_model(groups)
        return groups

    kinds = ValueError, TypeError, RuntimeError
    groups = job_agreement.agreed("fsdp_hook", check, partial(_described, algorithm), kinds)
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
