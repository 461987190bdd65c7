"""Averages the gradient shards of one FSDP parameter group over the nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.torch.buckets.bucket_queue import worse
from mpicomp.torch.buckets.bucket_reducer import BucketReducer, open_reducer
from mpicomp.torch.front_ends import AlgorithmChoice, algorithms_by_name
from mpicomp.torch.fsdp.parameter_groups import ParameterGroup, ShardedParameter


@dataclass(frozen=True, eq=False)
class ShardVector:
    """The shards that one algorithm averages as one vector."""

    reducer: BucketReducer
    members: list[ShardedParameter]
    """Parameters of which this rank has elements."""
    on_all_shards: list[ShardedParameter]
    """Parameters of which any rank has elements."""


class GroupReduction:
    """The vectors of a group, and those of them that are in flight.

    Parameters
    ----------
    group : ParameterGroup
    algorithm : AlgorithmChoice
        Members with equal algorithms share a vector.
    comm : Communicator
        Of the ranks that hold equal shards.
    number : callable
        Returns the number of the next vector, which shards of one parameter do not share: they draw other numbers.

    Attributes
    ----------
    vectors : list of ShardVector
        Those with elements on this rank; the ranks of `comm` have equal ones.
    described : list of list of str
        Algorithm and parameters of all vectors.
    """

    def __init__(
        self, group: ParameterGroup, algorithm: AlgorithmChoice, comm: Communicator, number: Callable[[], int]
    ) -> None:
        self.group, self._comm = group, comm
        self.vectors: list[ShardVector] = []
        self.described: list[list[str]] = []
        self._in_flight: list[tuple[ShardVector, list[Tensor]]] = []
        self._held: Tensor | None = None  # sums of backwards that are not averaged over the nodes
        chosen = algorithms_by_name(algorithm, group.placeholders)
        parts: dict[str, list[ShardedParameter]] = {}
        for member in group.members:
            parts.setdefault(str(chosen[member.name]), []).append(member)
        for text, members in parts.items():
            self._open(number(), members, chosen[members[0].name])
            self.described.append([text, *(one.name for one in members)])

    def _open(self, index: int, members: list[ShardedParameter], algorithm: Algorithm) -> None:
        filled = [one for one in members if one.local_shape.numel()]
        if not filled:
            return
        names = {one.name for one in filled}
        named = [one for one in self.group.placeholders if one.name in names]
        self.vectors.append(ShardVector(open_reducer(index, named, algorithm, self._comm), filled, members))

    @torch.no_grad()
    def begin(self, output: Tensor) -> bool:
        """Begin to average the reduce-scatter's output; return False if this backward is not averaged.

        Its gradients are kept and added to those of the next backward that is.

        Raises
        ------
        ValueError
            The output does not fit the vectors; CollectiveMismatch on the ranks where it does.
        """
        with self._comm.refusing("the gradients of FSDP", ValueError, where=self._comm.here):
            shards = self.group.shards_of(output)
        if not self.group.averages_now:
            self._held = output.clone() if self._held is None else self._held.add_(output)
            output.zero_()
            return False
        if self._held is not None:
            output.add_(self._held)
            self._held = None
        by_name = {member.name: shard for member, shard in zip(self.group.members, shards, strict=True)}
        for vector in self.vectors:
            own = [by_name[member.name] for member in vector.members]
            torch._foreach_copy_(vector.reducer.vector_views, own)
            vector.reducer.begin()
            self._in_flight.append((vector, own))
        return True

    @torch.no_grad()
    def finish(self) -> Exception | None:
        """Await the vectors in flight, and write their means into the output. NaN after an error; return the error."""
        in_flight, self._in_flight = self._in_flight, []
        found: Exception | None = None
        for vector, shards in in_flight:
            try:
                vector.reducer.wait()
                torch._foreach_copy_(shards, vector.reducer.mean_views)
            except Exception as error:  # noqa: BLE001 - the other vectors are waited for, lest they stay in flight
                found = worse(found, error)
                torch._foreach_mul_(shards, float("nan"))
        return found
