"""What a method has yet to contribute to the mean, so that it can be left without losing anything."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays import Device
from mpicomp.aggregator.parts import Feedback, StateKind
from mpicomp.feedback.mirror import Mirror

PENDING_KINDS = ("mean", "owner")


class Pending:
    """What a method has yet to contribute.

    Parameters
    ----------
    feedback : Feedback or None
        Of the method.
    ranks : int
    device : Device or None
        Where vectors are; None: in the host's memory.
    """

    def __init__(self, feedback: Feedback | None, ranks: int, device: Device | None = None) -> None:
        self._feedback, self._ranks, self._device = feedback, ranks, device
        self._crossed: Mirror | None = None  # what was pending; the device copies it while others compute
        self._kinds: dict[str, StateKind] = {} if feedback is None else feedback.state_kinds
        state = {} if feedback is None else feedback.state()
        self._fresh = {key: one for key, one in state.items() if self._kinds[key] not in PENDING_KINDS}

    def added_to(self, values: Any) -> Any:
        """The vector and all that is pending on this rank: what the mean is to be taken of; maybe a copy.

        Where vectors are on a device it is made there, and this waits for what is pending.
        """
        total: NDArray[Any] | None = None
        for key, array in ({} if self._feedback is None else self._feedback.state()).items():
            kind = self._kinds[key]
            if kind in PENDING_KINDS and array.shape == values.shape:
                if kind == "owner":  # its owner's alone is part of the mean, and as a whole
                    array *= array.dtype.type(self._ranks)
                total = array if total is None else np.add(total, array, out=total)
        if total is None:
            return values
        if self._device is None:
            return np.add(total, values, out=total)
        self._crossed = Mirror.of(self._device, total)
        self._device.run(partial(self._crossed.there.add_, values))
        return self._crossed.there

    def start_anew(self) -> None:
        """Forget what is pending, and everything else that the method has learnt."""
        self._crossed = None
        if self._feedback is not None:
            nothing = {key: np.zeros_like(array) for key, array in self._feedback.like().items()}
            self._feedback.load(nothing | self._fresh)
