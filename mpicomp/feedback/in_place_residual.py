"""A residual that steps write in place: a second buffer would take a third of the memory of a one-bit step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array
from collectives.arrays import Device
from mpicomp.feedback.base import copy_to_host, overwrite

Subtract = Callable[[Array], None]


class InPlaceResidual:
    """Residual of one vector. A step that fails spoils it, unless a copy was kept before.

    With a lazy residual (rule "paper") the result of a step is subtracted while the next one is encoded.

    Parameters
    ----------
    device : Device
    n : int
    dtype : dtype
    tensors : int
    lazy, keeps : bool
        Results are subtracted later; memory for copies is allocated now, as an allocation may fail in a step.

    Attributes
    ----------
    vector : array[n]
    pending : array[tensors]
        Factor of each tensor's signs that are not subtracted yet.
    spoiled : bool
        A failed step has overwritten a part.
    """

    def __init__(self, device: Device, n: int, dtype: DTypeLike, tensors: int, *, lazy: bool, keeps: bool) -> None:
        self._device, self._on_host, self._dtype = device, device.name == "cpu", np.dtype(dtype)
        self.vector = device.zeros(n, self._dtype.name)
        self.lazy, self.pending, self.spoiled = lazy, np.zeros(tensors, dtype), False
        self._spare = device.zeros(n, self._dtype.name) if keeps else None

    # The signs subtract pending results. They are arguments: kept here, they would form a cycle, which frees a device's
    # memory late.

    def settled(self, subtract_pending: Subtract) -> AnyArray:
        """Return a copy, on the host, with no result left to be subtracted."""
        found = self.copied(subtract_pending)
        return found if self._on_host else copy_to_host(self._device, found)

    def copied(self, subtract_pending: Subtract, into: Array | None = None) -> Array:
        """Return such a copy where vectors are; `into` is overwritten with it, if it is given."""
        found = self._device.zeros(len(self.vector), self._dtype.name) if into is None else into
        overwrite(self._device, found, self.vector)
        if self.lazy:
            subtract_pending(found)
        return found

    def kept(self, subtract_pending: Subtract) -> Array:
        """Return a copy for `restore`, in the memory that was allocated for it."""
        return self.copied(subtract_pending, self._spare)

    def restore(self, vector: Array) -> None:
        """Overwrite the residual by a settled one, of the host or the device."""
        overwrite(self._device, self.vector, vector)
        self.pending[:] = 0
        self.spoiled = False

    @property
    def like(self) -> AnyArray:
        """Array of the host with the vector's shape and type; it takes no memory."""
        return np.broadcast_to(np.zeros((), self._dtype), len(self.vector))
