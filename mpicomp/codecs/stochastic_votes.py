"""SSDM's votes: momentum, and signs that are drawn with a probability that grows with the element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpicomp.codecs.scale_groups import ScaleGroups, why
from mpicomp.codecs.scaled_votes import ScaledVotes
from mpicomp.kernels.streams import Stream, source


class _Part(NamedTuple):
    """A run of elements, its sums and its signs."""

    elements: slice
    group: int
    sums: NDArray[np.float64]
    bits: NDArray[np.uint64]


def _part_of(vector: NDArray[Any] | None, part: _Part) -> NDArray[Any] | None:
    return None if vector is None else vector[part.elements]


class StochasticVotes(ScaledVotes):
    """Momentum and norms of one vector.

    Parameters
    ----------
    groups, pieces, dtype, ranks, device
        As in `ScaledVotes`.
    rank : int
    momentum : float
        beta; 0: none is kept.
    stream : Stream
        Of the signs.
    counts : list of uint64 arrays
        Per piece, the counts that votes are written to.

    Attributes
    ----------
    momentum : ndarray[n] or None
    """

    state_kinds: ClassVar[dict[str, Any]] = {"momentum": "mean"}
    residual: ClassVar[None] = None

    def __init__(
        self,
        groups: ScaleGroups,
        pieces: Sequence[range],
        dtype: str,
        ranks: int,
        rank: int,
        momentum: float,
        stream: Stream,
        counts: list[NDArray[np.uint64]],
        device: str = "cpu",
    ) -> None:
        super().__init__(groups, pieces, dtype, ranks, device)
        kind = self._factors.dtype.type
        self.momentum = np.zeros(self._n, kind) if momentum else None
        self._moved = None if self.momentum is None else self.momentum.copy()  # the momentum that a step makes
        self._beta, self._gain = kind(momentum), kind(1 - momentum)
        self._schedule, self._source = stream.schedule(), source(rank)
        self._norms = np.zeros(self._factors.size)  # N of each group
        self._parts = [
            [_Part(run.elements, run.group, self._sums[run.sums], bits[run.words(cut.start)]) for run in of_piece]
            for cut, bits, of_piece in zip(pieces, counts, groups.runs(pieces), strict=True)
        ]
        self._step = np.uint64(0)

    def set_step(self, step: int) -> None:
        """Draw the signs of this step from now on."""
        self._step = np.uint64(step & 0xFFFFFFFF)

    def commit(self) -> None:
        """Go over to the momentum of the step that has ended."""
        if self._values is not self._nothing:
            self.momentum, self._moved = self._moved, self.momentum
        self.end()

    def measure(self, norms: NDArray[np.float64]) -> None:
        """Fill in this rank's norms, momentum included."""
        for part in chain.from_iterable(self._parts):
            values, momentum = self._values[part.elements], _part_of(self.momentum, part)
            self._kernels.ssdm.squares(values, momentum, self._beta, self._gain, part.sums)
        finite = self._kernels.vote_counts.segment_totals(self._sums, self.groups.firsts, norms)
        kind = self._factors.dtype
        np.sqrt(norms, out=norms)
        if not finite:
            self._measure_large(norms)
        # rounded once; a norm beyond the largest number becomes that: it is no less than any element
        norms[:] = np.where(np.isfinite(norms), np.minimum(norms, np.finfo(kind).max), norms).astype(kind)

    def _measure_large(self, norms: NDArray[np.float64]) -> None:
        """Norms of float64 groups whose squares overflow, by dividing by their largest magnitudes first."""
        for group in np.flatnonzero(~np.isfinite(norms)):
            part = slice(int(self.groups.starts[group]), int(self.groups.stops[group]))
            x = self._values[part]
            with np.errstate(over="ignore", invalid="ignore"):
                if self.momentum is not None:
                    x = self._beta * self.momentum[part] + self._gain * x
                largest = np.abs(x).max()
                if np.isfinite(largest):
                    norms[group] = min(largest * np.linalg.norm(x / largest), np.finfo(np.float64).max)
        if not np.isfinite(norms).all():
            norms[:] = why(self.all_finite(self._values))

    def set_scales(self, norms: NDArray[np.float64], values: NDArray[Any]) -> bool:
        """Fix N of each group, and what a unanimous vote stands for; False if a result would not be finite."""
        self._norms[:] = norms
        self._factors[:] = values.astype(self._factors.dtype) / self._ranks
        return self._representable()

    def encode(self, piece: int) -> None:
        """Draw the signs of this rank's piece."""
        for part in self._parts[piece]:
            self._kernels.ssdm.stochastic_signs(
                self._schedule, np.uint64(part.elements.start), self._step, self._source,
                self._values[part.elements], _part_of(self.momentum, part), _part_of(self._moved, part),
                self._beta, self._gain, self._norms[part.group], part.bits,
            )  # fmt: skip
