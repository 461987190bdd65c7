"""Support for training loops: shards of different lengths, and GradScalers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from collectives import Communicator

Batch = TypeVar("Batch")

_UNSCALES = "_unscale_grads_"
"""The function of GradScaler that reads the parameter groups only to look for infinities in the gradients."""
_MOST_FRAMES = 4
"""Frames between a property of the optimizer and its caller, at most."""


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
    """Yield this rank's batches, then make the steps of ranks that have more: see `DistributedOptimizer.join`."""
    comm = optimizer.comm
    for batch in batches:
        comm.allreduce(True)  # one more that has a batch
        yield batch
    while comm.allreduce(False):
        optimizer.zero_grad()
        optimizer.step()
        if after_step is not None:
            after_step()


def is_read_by_scaler() -> bool:
    """Return True if the calling property is read by a GradScaler that is about to unscale gradients.

    Wrappers of `keep_uncompiled` lie between the property and its reader.
    """
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame.f_code.co_name == _UNSCALES:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
