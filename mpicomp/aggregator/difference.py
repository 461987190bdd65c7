"""A vector that is still two: what its tensors were, and what they have become."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Difference:
    """The vector ``before - after``, which an aggregator takes in place of an array.

    Marsit reads both, never writes their difference, and leaves its result packed, which saves four of ten passes over
    memory. For other methods, and in full-precision rounds, the difference is taken when the call begins to compute.

    Parameters
    ----------
    before, after : sequence of ndarray
        The tensors, one for one, not empty, of the aggregator's type.
    views : sequence of ndarray
        Room for the difference, in the tensors' shapes. `after` may lie there.
    vector : ndarray[n]
        What the views are parts of. It is zero where it has padding.
    """

    __slots__ = ("_subtract", "_views", "after", "before", "vector")

    def __init__(
        self,
        before: Sequence[NDArray[Any]],
        after: Sequence[NDArray[Any]],
        views: Sequence[NDArray[Any]],
        vector: NDArray[Any],
    ) -> None:
        self.before, self.after, self.vector, self._views = before, after, vector, views
        self._subtract: Callable[[Sequence[NDArray[Any]]], None] | None = None

    def take(self) -> NDArray[Any]:
        """Write the difference into `vector`, and return that. `after` may be gone then."""
        for before, after, view in zip(self.before, self.after, self._views, strict=True):
            np.subtract(before, after, out=view)
        return self.vector

    def flat_tensors(self) -> list[tuple[NDArray[Any], NDArray[Any]]] | None:
        """`before` and `after` of each tensor as vectors, in the order of `vector`; None if one is not contiguous."""
        pairs = list(zip(self.before, self.after, strict=True))
        if not all(one.flags.c_contiguous for pair in pairs for one in pair):
            return None
        return [(before.reshape(-1), after.reshape(-1)) for before, after in pairs]

    def keep_packed(self, subtract: Callable[[Sequence[NDArray[Any]]], None]) -> None:
        """The call's result is not in `out`; `subtract` subtracts it from flat tensors."""
        self._subtract = subtract

    def subtract_result(self) -> bool:
        """Subtract the result of the call, which has ended well, from `before`, in place.

        Call it before the aggregator's next call. False: the result is in the `out` of the call, and nothing is done.
        """
        if self._subtract is None:
            return False
        self._subtract([before.reshape(-1) for before in self.before])
        return True
