"""What a method has yet to contribute to the mean, so that it can be left without losing anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp.aggregator.parts import Feedback, StateKind

PENDING_KINDS = ("mean", "owner")


class Pending:
    """What a method has yet to contribute."""

    def __init__(self, feedback: Feedback | None, ranks: int) -> None:
        self._feedback, self._ranks = feedback, ranks
        self._kinds: dict[str, StateKind] = {} if feedback is None else feedback.state_kinds
        state = {} if feedback is None else feedback.state()
        self._fresh = {key: one for key, one in state.items() if self._kinds[key] not in PENDING_KINDS}

    def added_to(self, values: NDArray[Any]) -> NDArray[Any]:
        """The vector and all that is pending on this rank: what the mean is to be taken of; maybe a copy."""
        total = None
        for key, array in ({} if self._feedback is None else self._feedback.state()).items():
            kind = self._kinds[key]
            if kind in PENDING_KINDS and array.shape == values.shape:
                if kind == "owner":  # its owner's alone is part of the mean, and as a whole
                    array *= array.dtype.type(self._ranks)
                total = array if total is None else np.add(total, array, out=total)
        return values if total is None else np.add(total, values, out=total)

    def start_anew(self) -> None:
        """Forget what is pending, and everything else that the method has learnt."""
        if self._feedback is not None:
            nothing = {key: np.zeros_like(array) for key, array in self._feedback.like().items()}
            self._feedback.load(nothing | self._fresh)
