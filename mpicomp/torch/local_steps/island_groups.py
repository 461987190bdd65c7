"""Islands that are process groups of PyTorch, such as NCCL's of the GPUs of a node.

Gradients are averaged by the caller's group. Between islands the communicator's own groups carry the updates, since
the progress thread makes calls there, and collectives of a group must start in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from collectives import CollectiveError, Communicator, PeerFailure
from collectives.quoting import list_ranks
from mpicomp.algorithms.per_island import Islands
from mpicomp.algorithms.per_node import Local
from mpicomp.torch.parameters import NamedParameter

CURE = "pass one of init_device_mesh(device_type, (nodes, ranks of a node)), or comm.nodes.local"


def require_own(given: object) -> None:
    """Raise ValueError for the number that `torch.distributed.new_group` returns where this rank is in no group."""
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"islands is a process group without this rank: {CURE}")


class IslandGroup:
    """Process group of the ranks of this rank's island.

    Parameters
    ----------
    given : ProcessGroup or DeviceMesh
    comm : Communicator
        Of all islands.
    members : sequence of NamedParameter

    Raises
    ------
    ValueError
        It is a mesh of several dimensions or without this rank, it was destroyed, it cannot carry the gradients, or
        `comm` regroups or does not verify.
    """

    def __init__(self, given: dist.ProcessGroup | DeviceMesh, comm: Communicator, members: Sequence[NamedParameter]):
        self._here = comm.here
        if not comm.verifies:
            raise ValueError("islands is a process group, which waits for ranks that differ: leave out verify=False")
        if comm.recovery is not None:
            raise ValueError(
                "islands is a process group, which does not outlive its ranks: with on_failure='regroup' pass "
                "comm.nodes.local"
            )
        self._group = _group_of(given) if isinstance(given, DeviceMesh) else given
        try:
            self.ranks = dist.get_process_group_ranks(self._group)
        except (KeyError, ValueError):
            raise ValueError(f"islands is a process group that was destroyed, or never registered: {CURE}") from None
        devices = {one.parameter.device for one in members}
        self._backends = sorted({self._backend_at(device) for device in devices})
        self._carries_updates = True

    def _backend_at(self, device: torch.device) -> str:
        try:
            name: str = self._group._get_backend(device).name()
        except RuntimeError:
            raise ValueError(
                f"islands is a process group without a backend for {device.type}, where parameters are: make it by "
                "init_process_group('nccl') for GPUs, or 'gloo' for the CPU"
            ) from None
        return name

    def average(self, flat: Tensor) -> Tensor:
        """Replace a vector by its mean over the island; collective, in one order on its ranks."""
        try:
            dist.all_reduce(flat, group=self._group)
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise PeerFailure(f"{self._here}, averaging gradients within an island: {error}") from error
        return flat.div_(len(self.ranks))

    def open(self, comm: Communicator) -> Islands:
        """Return the islands, of which each rank passes its own; collective.

        Raises
        ------
        ValueError
            On every rank: a group has ranks that `comm` lacks, or groups of ranks overlap.
        """
        everyones = comm.allgather_object((dist.get_rank(), self.ranks, self._group.group_name, self._backends))
        rank_of = {number: rank for rank, (number, *_) in enumerate(everyones)}
        if len(rank_of) < comm.size:
            raise ValueError(
                f"{comm.here}: several ranks have one number in torch.distributed, as in process groups of single "
                "nodes: make one of all ranks by init_process_group(), or pass comm.nodes.local"
            )
        given: list[tuple[list[int], str]] = []
        for rank, (_, numbers, name, backends) in enumerate(everyones):
            lacking = [one for one in numbers if one not in rank_of]
            if lacking:
                raise ValueError(
                    f"{comm.here}: the island of rank {rank} has {list_ranks(lacking)} of torch.distributed, which "
                    "this communicator lacks: pass a communicator of all ranks"
                )
            given.append((sorted(rank_of[one] for one in numbers), name))
            self._carries_updates &= backends == ["nccl"]
        for rank, (members, _) in enumerate(given):
            others = [one for one in members if given[one] != given[rank]]
            if others:
                raise ValueError(
                    f"{comm.here}: the island of rank {rank} is another process group than that of {list_ranks(others)}"
                    f", which is in it: {CURE}, on each of its ranks"
                )
        return Islands.of_keys(comm, [members[0] for members, _ in given])

    def way_of(self, comm: Communicator, islands: Islands) -> Local:
        """Return the way of updates within islands: NCCL where it carries all gradients of islands on one host."""
        hosts, node_of = comm.hosts.node_of, islands.layout.node_of
        on_one_host = len({*zip(node_of, hosts, strict=True)}) == len(islands.layout.sizes)
        return "nccl" if on_one_host and self._carries_updates else "auto"


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of a mesh of one dimension; raises ValueError if it has several, or is without this rank."""
    if mesh.ndim > 1:
        names = "" if mesh.mesh_dim_names is None else f", such as mesh[{mesh.mesh_dim_names[-1]!r}]"
        raise ValueError(f"islands is a mesh of {mesh.ndim} dimensions: pass one of them{names}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"islands is a mesh without this rank: {CURE}")
    return mesh.get_group()
