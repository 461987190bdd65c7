"""A residual that steps write in place: a second buffer would take a third of the memory of a one-bit step.

Steps that may be taken back have the second buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from collectives.annotations import AnyArray, Array, override
from mpicomp.feedback.base import Residual
from mpicomp.spaces import Space

Subtract = Callable[[Array], None]


class InPlaceResidual(Residual):
    """Residual of one vector. A step that fails spoils it, unless the step was begun with `keeps` and is rolled back.

    `following` is the second buffer in a step with `keeps`, else the same one as `current`. With a lazy residual (rule
    "paper") the result of a step is subtracted while the next one is encoded.

    Parameters
    ----------
    space : Space
    n : int
    dtype : dtype
    tensors : int
    lazy, keeps : bool
        Results are subtracted later; the second buffer is allocated now, as an allocation may fail in a step.

    Attributes
    ----------
    pending : array[tensors]
        Factor of each tensor's signs that are not subtracted yet.
    spoiled : bool
        A failed step was not rolled back.
    """

    def __init__(self, space: Space, n: int, dtype: DTypeLike, tensors: int, *, lazy: bool, keeps: bool) -> None:
        self.kind, self.is_pending, self._space, self._dtype = "mean", True, space, np.dtype(dtype)
        self.current = self.following = space.zeros(n, dtype)
        self._second = space.zeros(n, dtype) if keeps else None
        self.lazy, self.pending, self.spoiled = lazy, np.zeros(tensors, dtype), False

    # The signs subtract pending results. They are arguments: kept here, they would form a cycle, which frees a device's
    # memory late.

    def begin(self, keeps: bool, subtract_pending: Subtract) -> None:
        """Start a step; `keeps` the old residual until the next one starts."""
        self.following = self.current
        if not keeps:
            return
        if self.lazy and self.pending.any():
            subtract_pending(self.current)  # now, since the step overwrites the signs
            self.pending[:] = 0
        if self._second is None:
            self._second = self._space.zeros(len(self.current), self._dtype)
        self.following = self._second

    @override
    def commit(self) -> None:
        if self.following is not self.current:
            self.current, self._second = self.following, self.current

    def roll_back(self) -> None:
        """End a step that was begun with `keeps`, with the old residual."""
        self.following = self.current
        self.pending[:] = 0

    @override
    def undo(self) -> None:
        """Take back the last step, which was begun with `keeps`."""
        if self._second is not None and self.following is self.current:  # it was committed
            self.current, self._second = self._second, self.current
        self.roll_back()

    def copy_settled(self, subtract_pending: Subtract) -> AnyArray:
        """Return a copy, on the host, with no result left to be subtracted."""
        if not self.lazy:
            return self.to_host()
        found = self._space.zeros(len(self.current), self._dtype)
        self._space.overwrite(found, self.current)
        subtract_pending(found)
        return self._space.saved(found)

    @override
    def restore(self, values: Array) -> None:
        """Overwrite the residual by a settled one."""
        super().restore(values)
        self.pending[:] = 0
        self.spoiled = False
