"""Pending errors of a method, which a dense step adds to the mean before the method is left."""

from __future__ import annotations

from functools import partial

import numpy as np

from collectives.annotations import AnyArray, Array
from collectives.arrays import Device
from mpicomp.aggregator.parts import Feedback, StateKind
from mpicomp.feedback.mirror import Mirror

PENDING_KINDS = ("mean", "owner")


class Pending:
    """Errors that a method has yet to contribute to the mean.

    Parameters
    ----------
    feedback : Feedback or None
        Feedback of the method.
    ranks : int
    device : Device or None
        Device of the vectors; None: the host.
    """

    def __init__(self, feedback: Feedback | None, ranks: int, device: Device | None = None) -> None:
        self._feedback, self._ranks, self._device = feedback, ranks, device
        self._crossed: Mirror | None = None  # keeps the memory alive that the device copies in the background
        self._kinds: dict[str, StateKind] = {} if feedback is None else feedback.state_kinds
        state = {} if feedback is None else feedback.state()
        self._fresh = {key: one for key, one in state.items() if self._kinds[key] not in PENDING_KINDS}

    def added_to(self, values: Array) -> Array:
        """Return the sum of a vector and this rank's pending errors, or the vector itself if no error is pending.

        For vectors on a device the sum is computed there; this waits until the errors are in the host's memory.
        """
        total: AnyArray | None = None
        for key, array in ({} if self._feedback is None else self._feedback.state()).items():
            kind = self._kinds[key]
            if kind in PENDING_KINDS and array.shape == values.shape:
                # only the owner has the error of an element; the mean divides it by the number of ranks
                if kind == "owner":
                    array *= array.dtype.type(self._ranks)
                total = array if total is None else np.add(total, array, out=total)
        if total is None:
            return values
        if self._device is None:
            return np.add(total, values, out=total)
        self._crossed = Mirror.of(self._device, total)
        self._device.run(partial(self._crossed.there.add_, values))
        return self._crossed.there

    def reset_method(self) -> None:
        """Reset the method: forget pending errors and all other state."""
        self._crossed = None
        if self._feedback is not None:
            nothing = {key: np.zeros_like(array) for key, array in self._feedback.like().items()}
            self._feedback.load(nothing | self._fresh)
