"""Values of vote counts: a factor times the sum of the ranks' signs, each scale group of the vector with its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.memory import SIXTEEN_BIT, narrow, widen
from mpicomp.codecs.scale_groups import ScaleGroups
from mpicomp.codecs.vote_counts import write_values

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches


class ScaledVotes:
    """The values of one vector.

    Parameters
    ----------
    groups : ScaleGroups
    pieces : sequence of range
        Elements of each piece.
    dtype : str
        Of the result.
    ranks : int

    Attributes
    ----------
    factors : float32[groups] or float64[groups]
        Of this step.
    spans : list of (int, int)
        Per piece, the first group with elements in it and the one behind the last.
    sums : float64[blocks]
        Room for the sums that scales are made of.
    """

    def __init__(self, groups: ScaleGroups, pieces: Sequence[range], dtype: str, ranks: int) -> None:
        self.groups, self._pieces, self._dtype, self._ranks = groups, pieces, dtype, ranks
        self.n = pieces[-1].stop if pieces else 0
        self.sums = np.zeros(groups.blocks)
        self.spans = [groups.span(cut) for cut in pieces]
        self.factors: NDArray[Any] = np.zeros(groups.starts.size, np.float64 if dtype == "float64" else np.float32)
        self._narrow = dtype in SIXTEEN_BIT
        self._nothing: NDArray[Any] = np.empty(0)
        self._target: NDArray[Any] = self._nothing
        self._out: NDArray[Any] = self._nothing
        self._streaming = False

    def begin(self, out: NDArray[Any], wide: NDArray[Any] | None) -> None:
        """Write to `out`; 16-bit results are made in float32 in `wide`, of which a piece may be overwritten by then."""
        self._out, self._target = out, out if wide is None else wide
        self._streaming = wide is None and self.n >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._out = self._target = self._nothing

    def finish(self, piece: int, counts: NDArray[np.uint64], words: int) -> None:
        """Write the values of a piece's complete counts."""
        cut = self._pieces[piece]
        target = self._target[cut.start : cut.stop]
        where = self.groups.starts, self.groups.stops, cut.start, *self.spans[piece]
        write_values(counts, words, self._ranks, self.factors, where, self._streaming, target)
        if self._narrow:
            narrow(target, self._dtype, self._out[cut.start : cut.stop])

    def representable(self) -> bool:
        """Whether the largest result, where all ranks have one sign, is finite in the results' type."""
        with np.errstate(over="ignore"):
            largest = self.factors * self.factors.dtype.type(self._ranks)
        if self._narrow:
            rounded = np.empty(largest.size, np.uint16 if self._dtype == "bfloat16" else np.float16)
            narrow(largest, self._dtype, rounded)
            widen(rounded, self._dtype, largest)
        return bool(np.isfinite(largest).all())
