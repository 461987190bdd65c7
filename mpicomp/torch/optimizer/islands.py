"""Islands: ranks that average their gradients at every step, and hold equal models between synchronizations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from collectives import Communicator
from collectives.communicator.nodes import NodeLayout
from mpicomp.algorithms import Algorithm, PerNode
from mpicomp.algorithms.per_island import PerIsland
from mpicomp.torch.buckets import Bucket, NamedParameter, group_parameters, make_bucket


def require_islands(
    islands: object, comm: Communicator, optimizer: torch.optim.Optimizer, algorithms: Mapping[str, Algorithm]
) -> None:
    """Raise TypeError or ValueError unless the argument is a communicator, and the optimizer can be equal within it."""
    if not isinstance(islands, Communicator):
        raise TypeError(
            f"islands is of type {type(islands).__name__}: pass the communicator of the ranks of this rank's island, "
            "comm.nodes.local or comm.split(color)"
        )
    if comm.regroup is not None or islands.regroup is not None:
        raise ValueError(
            "islands do not outlive their ranks: leave out islands, or make communicators with on_failure='raise'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("islands cannot be combined with LBFGS, which decides by each rank's own loss")
    nested = next((one for one in algorithms.values() if isinstance(one, PerNode)), None)
    if nested is not None:
        raise ValueError(f"islands cannot be combined with {nested}: pass {nested.method}, which runs between islands")


def between_islands(algorithms: Mapping[str, Algorithm], layout: NodeLayout | None) -> Mapping[str, Algorithm]:
    """Return the algorithms of parameters, each between the islands of a layout; None: as they are."""
    return algorithms if layout is None else {k: PerIsland(one, layout=layout) for k, one in algorithms.items()}


class IslandGradients:
    """Means of gradients over the ranks of an island, in full precision.

    `comm` has the ranks of the island.
    """

    def __init__(self, comm: Communicator, bucket_mb: float) -> None:
        self._comm, self._bucket_mb = comm, bucket_mb
        self._members: tuple[NamedParameter, ...] = ()
        self._buckets: list[tuple[Bucket, Tensor]] = []

    @torch.no_grad()
    def average(self, members: Sequence[NamedParameter]) -> None:
        """Replace each gradient by its mean. A missing one counts as zeros, and is there afterwards."""
        if self._comm.size == 1:
            return
        self._lay_out(tuple(members))
        for bucket, flat in self._buckets:
            gradients, views = [self._gradient(member) for member in bucket.members], bucket.views(flat)
            torch._foreach_copy_(views, gradients)
            self._comm.allreduce(flat, "mean", out=flat)
            torch._foreach_copy_(gradients, views)

    def _lay_out(self, members: tuple[NamedParameter, ...]) -> None:
        """Let buckets of one type and device take turns with one vector."""
        if [id(one.parameter) for one in members] == [id(one.parameter) for one in self._members]:
            return
        self._members = members
        groups = group_parameters(members, self._bucket_mb)
        buckets = [make_bucket(index, group) for index, group in enumerate(groups)]
        vectors: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for one in sorted(buckets, key=lambda bucket: -bucket.n):
            kind = one.dtype, one.device
            if kind not in vectors:
                vectors[kind] = torch.zeros(one.n, dtype=one.dtype, device=one.device)
        self._buckets = [(one, vectors[one.dtype, one.device][: one.n]) for one in buckets]

    def _gradient(self, member: NamedParameter) -> Tensor:
        parameter = member.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            error = ValueError(
                f"{self._comm.here}: the gradient of {member.name!r} is sparse, which islands do not average; build "
                "its layer with sparse=False"
            )
            self._comm.reject(error, "averaging gradients within an island")
        return parameter.grad
