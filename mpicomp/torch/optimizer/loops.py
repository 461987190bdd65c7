"""Training on shards of different lengths: ranks whose batches are used up go on with the others' steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from collectives import Communicator

Batch = TypeVar("Batch")


class Stepping(Protocol):
    """An optimizer whose steps are collective."""

    comm: Communicator

    def zero_grad(self) -> None:
        """Drop the gradients."""
        ...

    def step(self) -> object:
        """Make a step together with all ranks."""
        ...


def joined(optimizer: Stepping, batches: Iterable[Batch], after_step: Callable[[], object] | None) -> Iterator[Batch]:
    """See `mpicomp.torch.DistributedOptimizer.join`."""
    comm = optimizer.comm
    for batch in batches:
        comm.allreduce(True)  # one more that has a batch
        yield batch
    while comm.allreduce(False):
        optimizer.zero_grad()
        optimizer.step()
        if after_step is not None:
            after_step()
