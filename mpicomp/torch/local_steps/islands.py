"""Islands: ranks that average their gradients at every step, and hold equal models between synchronizations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from collectives import Communicator
from collectives.consistency.descriptions import fingerprint
from collectives.errors import CollectiveError, reword
from collectives.recovery.newcomers import newcomers_of
from mpicomp.algorithms import Algorithm, PerNode
from mpicomp.algorithms.per_island import IslandMean, Islands, PerIsland
from mpicomp.algorithms.per_node import Local
from mpicomp.torch.buckets.bucket_layout import Bucket, group_parameters, make_bucket
from mpicomp.torch.local_steps.island_groups import IslandGroup, require_own
from mpicomp.torch.parameters import NamedParameter

Mean = Callable[[Tensor], Tensor]


def find_islands(
    islands: object,
    comm: Communicator,
    optimizer: torch.optim.Optimizer,
    members: Sequence[NamedParameter],
    algorithms: Mapping[str, Algorithm],
) -> Communicator | IslandGroup:
    """Return the ranks of this rank's island.

    Raises
    ------
    TypeError
        The argument is neither a communicator nor a process group or mesh of PyTorch.
    ValueError
        It cannot be used, or the optimizer cannot be equal within it.
    """
    require_own(islands)
    if not isinstance(islands, Communicator | ProcessGroup | DeviceMesh):
        raise TypeError(
            f"islands is of type {type(islands).__name__}: pass the communicator of the ranks of this rank's island, "
            "comm.nodes.local or comm.split(color), or their process group of PyTorch"
        )
    if isinstance(islands, Communicator) and not islands.calls.is_open:
        raise ValueError(f"islands cannot be used, {islands.calls.reason}: pass a communicator that is open")
    if newcomers_of(comm) is not None:
        raise ValueError("islands take no newcomers: leave out islands, or make the communicator without spares")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("islands cannot be combined with LBFGS, which decides by each rank's own loss")
    nested = next((one for one in algorithms.values() if isinstance(one, PerNode)), None)
    if nested is not None:
        raise ValueError(f"islands cannot be combined with {nested}: pass {nested.method}, which runs between islands")
    return islands if isinstance(islands, Communicator) else IslandGroup(islands, comm, members)


def islands_text(islands: object) -> Literal["", "communicator", "process group"]:
    """Return the kind of the argument, which is equal on all ranks."""
    if islands is None:
        return ""
    return "communicator" if isinstance(islands, Communicator) else "process group"


def between_islands(
    algorithms: Mapping[str, Algorithm], islands: Islands | None, local: Local = "auto"
) -> Mapping[str, Algorithm]:
    """Return the algorithms of parameters, each between the islands; None: as they are."""
    if islands is None:
        return algorithms
    return {name: PerIsland(one, local, islands=islands) for name, one in algorithms.items()}


class IslandGradients:
    """Means of gradients over the ranks of an island, in full precision.

    Ranks of an island wait for each other alone. Where `comm` regroups after a death they wait for all its ranks, since
    a mean ends on all survivors or is made again. A `group` of PyTorch makes the means itself.
    """

    def __init__(
        self, comm: Communicator, islands: Islands, bucket_mb: float, group: IslandGroup | None = None
    ) -> None:
        self._comm, self._islands, self._bucket_mb, self._group = comm, islands, bucket_mb, group
        self._mark = 0
        self._members: tuple[NamedParameter, ...] = ()
        self._buckets: list[tuple[Bucket, Tensor, Mean]] = []

    @torch.no_grad()
    def average(self, members: Sequence[NamedParameter]) -> bool:
        """Replace each gradient by its mean, and return whether other ranks have taken part.

        A missing gradient counts as zeros, and is there afterwards.
        """
        layout = self._islands.layout
        if (max(layout.sizes) if self._comm.recovery is not None else layout.sizes[layout.node]) == 1:
            return False
        self._lay_out(tuple(members))
        try:
            every = [[self._gradient(member) for member in bucket.members] for bucket, _, _ in self._buckets]
        except CollectiveError:
            raise
        except RuntimeError as error:  # such as PyTorch's of missing memory
            self.reject(reword(error, f"{self._comm.here}, averaging gradients within an island: {error}"))
        if self._group is not None:
            # parameters that one rank alone trains, its error or its death are raised here: a process group would wait
            # for it, or end the process
            self._within.agree(self._mark, _description(self._members))
        try:
            for (bucket, flat, mean), gradients in zip(self._buckets, every, strict=True):
                views = bucket.views(flat)
                torch._foreach_copy_(views, gradients)
                torch._foreach_copy_(gradients, bucket.views(mean(flat)))
        except BaseException as error:
            # the others have means of these buckets, or wait for them in a group, which learns of no error
            if self._group is not None or not isinstance(error, CollectiveError):
                self.give_up(error)
            raise
        return True

    def _lay_out(self, members: tuple[NamedParameter, ...]) -> None:
        """Let buckets of one type and device take turns with one vector."""
        if [id(one.parameter) for one in members] == [id(one.parameter) for one in self._members]:
            return
        groups = group_parameters(members, self._bucket_mb)
        buckets = [make_bucket(index, group) for index, group in enumerate(groups)]
        vectors: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        try:
            for one in sorted(buckets, key=lambda bucket: -bucket.n):
                kind = one.dtype, one.device
                if kind not in vectors:
                    vectors[kind] = torch.zeros(one.n, dtype=one.dtype, device=one.device)
        except RuntimeError as error:  # such as PyTorch's of missing memory
            self.reject(reword(error, f"{self._comm.here}, averaging gradients within an island: {error}"))
        self._members = ()  # until the new layout is whole
        self._buckets = [(one, flat := vectors[one.dtype, one.device][: one.n], self._mean_of(flat)) for one in buckets]
        self._mark = fingerprint(str([(one.name, one.parameter.dtype, [*one.parameter.shape]) for one in members]))
        if self._group is None and self._comm.recovery is None:  # once: later calls compare lengths
            self._within.agree(self._mark, _description(members))
        self._members = members

    def give_up(self, error: BaseException) -> None:
        """End the calls of the island and of all ranks by this rank's error."""
        if self._comm.recovery is None and len(self._islands.layout.sizes) < self._comm.size:
            self._within.ending.give_up(error)
        self._comm.ending.give_up(error)

    def _mean_of(self, flat: Tensor) -> Mean:
        """Return a function that averages vectors of this type and length, perhaps in place; collective."""
        if self._group is not None:
            return self._group.average
        if self._comm.recovery is None:
            return partial(self._within.allreduce, op="mean", out=flat)
        dtype = str(flat.dtype).removeprefix("torch.")
        return IslandMean(self._islands).start(self._comm, flat.numel(), dtype=dtype).aggregate

    def _gradient(self, member: NamedParameter) -> Tensor:
        parameter = member.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif parameter.grad.layout != torch.strided:
            error = ValueError(
                f"{self._comm.here}: the gradient of {member.name!r} is sparse, which islands do not average; build "
                "its layer with sparse=False"
            )
            self.reject(error)
        return parameter.grad

    def reject(self, error: Exception) -> NoReturn:
        """Raise the error here, and CollectiveMismatch on the ranks that wait for this one's gradients."""
        # the communicators of islands of one rank each are never made
        whole = self._comm.recovery is not None or len(self._islands.layout.sizes) == self._comm.size
        (self._comm if whole else self._within).reject(error, "averaging gradients within an island")

    @property
    def _within(self) -> Communicator:
        """The communicator of this rank's island."""
        return self._comm.nodes_of(self._islands.layout).local


def _description(members: Sequence[NamedParameter]) -> Callable[[], str]:
    """Return a function that describes the means of gradients without keeping the parameters alive."""
    count, last = len(members), members[-1].name
    return lambda: f"the means of gradients within an island of {count} parameters, the last of them {last!r}"
