"""SSDM's votes: momentum, and signs that are drawn with a probability that grows with the element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.feedback.scale_groups import ScaleGroups, why
from mpicomp.feedback.scaled_votes import ScaledVotes
from mpicomp.kernels.streams import Stream, source


class _Part(NamedTuple):
    """A run of elements, its sums and its signs."""

    elements: slice
    group: int
    sums: NDArray[np.float64]
    bits: NDArray[np.uint64]


def _part_of(vector: Any, part: _Part) -> Any:
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

    Attributes
    ----------
    momentum : ndarray[n] or None
        A tensor where the vector is on a device.
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
        device: str = "cpu",
    ) -> None:
        super().__init__(groups, pieces, dtype, ranks, device)
        kind = self._factors.dtype.type
        self.momentum = self._zeros(self._n, kind) if momentum else None
        self._moved = self._zeros(self._n, kind) if momentum else None  # the momentum that a step makes
        self._beta, self._gain = kind(momentum), kind(1 - momentum)
        self._schedule, self._source = stream.schedule(), source(rank)
        self._norms = np.zeros(self._factors.size)  # N of each group
        self._parts: list[list[_Part]] = []
        self._step = np.uint64(0)

    def lay_out(self, counts: Sequence[NDArray[np.uint64]]) -> None:
        """See `ScaledVotes`."""
        super().lay_out(counts)
        self._parts = [
            [_Part(run.elements, run.group, self._sums[run.sums], bits[run.words(cut.start)]) for run in of_piece]
            for cut, bits, of_piece in zip(self._pieces, self._counts, self.groups.runs(self._pieces), strict=True)
        ]

    def set_step(self, step: int) -> None:
        """Draw the signs of this step from now on."""
        self._step = np.uint64(step & 0xFFFFFFFF)

    def commit(self) -> None:
        """Go over to the momentum of the step that has ended."""
        if self._values is not self._nothing:
            self.momentum, self._moved = self._moved, self.momentum
        self.end()

    def square(self) -> Testable | None:
        """Sum the squares of this rank's vector, momentum included."""
        for part in chain.from_iterable(self._parts):
            values, momentum = self._values[part.elements], _part_of(self.momentum, part)
            self._kernels.ssdm.squares(values, momentum, self._beta, self._gain, part.sums)
        return None

    def measure(self, norms: NDArray[np.float64]) -> None:
        """Fill in this rank's norms, once the squares are summed."""
        finite = kernels.of("cpu").vote_counts.segment_totals(self._host_sums, self.groups.firsts, norms)
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
            x = self._to_host(self._values[part])
            with np.errstate(over="ignore", invalid="ignore"):
                if self.momentum is not None:
                    x = self._beta * self._to_host(self.momentum[part]) + self._gain * x
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

    def encode(self, piece: int) -> Testable | None:
        """Draw the signs of this rank's piece; see `SignFeedback`."""
        self._encode(piece)
        return None

    def _encode(self, piece: int) -> None:
        for part in self._parts[piece]:
            self._kernels.ssdm.stochastic_signs(
                self._schedule, np.uint64(part.elements.start), self._step, self._source,
                self._values[part.elements], _part_of(self.momentum, part), _part_of(self._moved, part),
                self._beta, self._gain, self._norms[part.group], part.bits,
            )  # fmt: skip
