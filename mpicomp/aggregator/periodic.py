"""Full-precision rounds: steps whose result is the exact mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from collectives.annotations import FloatArray
from mpicomp.aggregator.call import VectorCall


class FullPrecisionRounds:
    """Dense steps of a method, at regular intervals.

    Parameters
    ----------
    every : int or None
        K: steps 0, K, 2K, ... are dense; None: no step is dense.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every

    def due(self, step: int) -> bool:
        """Return True if a step is dense."""
        return self._every is not None and step % self._every == 0

    def mean(
        self, call: VectorCall, values: FloatArray, out: FloatArray, scratch: Sequence[FloatArray] = ()
    ) -> Iterator[bool]:
        """Write the mean over ranks of `values` to `out`; a float32 copy of a 16-bit vector is overwritten."""
        return call.group.dense_steps(call, values, call.spec.dtype, True, out, call.traffic, scratch)
