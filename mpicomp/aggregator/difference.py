"""Vector that is given as the difference of two sets of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from collectives.annotations import AnyArray


class Difference:
    """Vector ``before - after``, which an aggregator takes in place of an array.

    Marsit reads both sets, never writes their difference, and leaves its result packed, which saves four of ten passes
    over memory. Other methods, and full-precision rounds, compute the difference when the call begins to compute.

    Parameters
    ----------
    before, after : sequence of ndarray
        Corresponding tensors, not empty, of the aggregator's type.
    views : sequence of ndarray
        Memory for the difference, in the tensors' shapes. It may be that of `after`.
    vector : ndarray[n]
        Vector that contains the views; its padding is zero.
    may_stay_packed : bool
        False: the result is written to ``out`` in any case.
    """

    __slots__ = ("_subtract", "_views", "after", "before", "may_stay_packed", "vector")

    def __init__(
        self,
        before: Sequence[AnyArray],
        after: Sequence[AnyArray],
        views: Sequence[AnyArray],
        vector: AnyArray,
        may_stay_packed: bool = True,
    ) -> None:
        self.before, self.after, self.vector, self._views = before, after, vector, views
        self.may_stay_packed = may_stay_packed
        self._subtract: Callable[[Sequence[AnyArray]], None] | None = None

    def take(self) -> AnyArray:
        """Write the difference into `vector` and return it; this may overwrite `after`."""
        for before, after, view in zip(self.before, self.after, self._views, strict=True):
            np.subtract(before, after, out=view)
        return self.vector

    def flat_tensors(self) -> list[tuple[AnyArray, AnyArray]] | None:
        """Return `before` and `after` of each tensor as vectors, in order; None if a tensor is not contiguous."""
        pairs = list(zip(self.before, self.after, strict=True))
        if not all(one.flags.c_contiguous for pair in pairs for one in pair):
            return None
        return [(before.reshape(-1), after.reshape(-1)) for before, after in pairs]

    def keep_packed(self, subtract: Callable[[Sequence[AnyArray]], None]) -> None:
        """Leave the call's result out of `out`; `subtract` subtracts it from flat tensors instead."""
        self._subtract = subtract

    def subtract_result(self) -> bool:
        """Subtract the result of the call, which has succeeded, from `before`, in place.

        Call it before the aggregator's next call. Returns False, and does nothing, if the result is in `out`.
        """
        if self._subtract is None:
            return False
        self._subtract([before.reshape(-1) for before in self.before])
        return True
