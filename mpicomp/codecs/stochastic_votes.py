"""SSDM's votes: momentum, and signs that are drawn with a probability that grows with the element."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.codecs.reasons import tell_why
from mpicomp.codecs.scale_groups import ScaleGroups
from mpicomp.codecs.scaled_votes import ScaledVotes
from mpicomp.kernels.streams import BLOCK, Stream, source


class _Part:
    """A group's elements in one piece, or in one block where they begin within it; its sums and its signs."""

    __slots__ = ("bits", "elements", "group", "sums")

    def __init__(self, elements: slice, group: int, sums: NDArray[np.float64], bits: NDArray[np.uint64]) -> None:
        self.elements, self.group, self.sums, self.bits = elements, group, sums, bits


def _part_of(vector: NDArray[Any] | None, part: _Part) -> NDArray[Any] | None:
    return None if vector is None else vector[part.elements]


class StochasticVotes:
    """Momentum and norms of one vector.

    Parameters
    ----------
    groups : ScaleGroups
    pieces : sequence of range
        Elements of each piece.
    dtype, ranks, rank : str, int, int
    momentum : float
        beta; 0: none is kept.
    stream : Stream
        Of the signs.
    counts : list of uint64 arrays
        Per piece, the counts that votes are written to.
    device : str

    Attributes
    ----------
    momentum : ndarray[n] or None
    """

    state_kinds: ClassVar[dict[str, Any]] = {"momentum": "mean"}
    state_nan: ClassVar[str] = ""
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
        self._kernels = kernels.of(device)
        self.groups, self._pieces, self._ranks = groups, pieces, ranks
        self._votes = ScaledVotes(groups, pieces, dtype, ranks)
        kind = self._votes.factors.dtype.type
        self.momentum = np.zeros(self._votes.n, kind) if momentum else None
        self._moved = None if self.momentum is None else self.momentum.copy()  # the momentum that a step makes
        self._beta, self._gain = kind(momentum), kind(1 - momentum)
        self._schedule, self._source = stream.schedule(), source(rank)
        self._norms = np.zeros(self._votes.factors.size)  # N of each group
        self._parts = [list(self._cut(piece, counts[piece])) for piece in range(len(pieces))]
        self._nothing = self._values = np.empty(0, kind)
        self._step = np.uint64(0)

    def _cut(self, piece: int, counts: NDArray[np.uint64]) -> Iterator[_Part]:
        cut, where = self._pieces[piece], self.groups
        for group in range(*self._votes.spans[piece]):
            begin = int(where.starts[group])
            start, stop = max(begin, cut.start), min(int(where.stops[group]), cut.stop)
            while start < stop:
                end = stop if start % BLOCK == 0 else min(stop, start - start % BLOCK + BLOCK)
                block = int(where.firsts[group]) + start // BLOCK - begin // BLOCK
                sums = self._votes.sums[block : block + -(-(end - start) // BLOCK)]
                bits = counts[(start - cut.start) // 64 : -(-(end - cut.start) // 64)]
                yield _Part(slice(start, end), group, sums, bits)
                start = end

    def check_ready(self) -> None:
        """See `Feedback`: always ready."""

    def begin(self, step: int, values: NDArray[Any], out: NDArray[Any], wide: NDArray[Any] | None) -> None:
        """Go to another vector and step."""
        self._step, self._values = np.uint64(step & 0xFFFFFFFF), values
        self._votes.begin(out, wide)

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._values = self._nothing
        self._votes.end()

    def commit(self) -> None:
        """Go over to the momentum of the step that has ended."""
        if self._values.size:
            self.momentum, self._moved = self._moved, self.momentum
        self.end()

    def measure(self, norms: NDArray[np.float64]) -> None:
        """Fill in this rank's norms, momentum included."""
        for part in chain.from_iterable(self._parts):
            values, momentum = self._values[part.elements], _part_of(self.momentum, part)
            self._kernels.ssdm.squares(values, momentum, self._beta, self._gain, part.sums)
        finite = self._kernels.vote_counts.segment_totals(self._votes.sums, self.groups.firsts, norms)
        kind = self._votes.factors.dtype
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
            tell_why(norms, self._values)

    def set_scales(self, norms: NDArray[np.float64], values: NDArray[Any]) -> bool:
        """Fix N of each group, and what a unanimous vote stands for; False if a result would not be finite."""
        self._norms[:] = norms
        self._votes.factors[:] = values.astype(self._votes.factors.dtype) / self._ranks
        return self._votes.representable()

    def encode(self, piece: int) -> None:
        """Draw the signs of this rank's piece."""
        for part in self._parts[piece]:
            self._kernels.ssdm.stochastic_signs(
                self._schedule, np.uint64(part.elements.start), self._step, self._source,
                self._values[part.elements], _part_of(self.momentum, part), _part_of(self._moved, part),
                self._beta, self._gain, self._norms[part.group], part.bits,
            )  # fmt: skip

    def finish(self, piece: int, counts: NDArray[np.uint64], words: int) -> None:
        """Write the values of a piece's complete counts."""
        self._votes.finish(piece, counts, words)

    def state(self) -> dict[str, NDArray[Any]]:
        """The momentum; a copy."""
        return {key: array.copy() for key, array in self.like().items()}

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {} if self.momentum is None else {"momentum": self.momentum}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        if self.momentum is not None:
            self.momentum[:] = state["momentum"]
        return ""
