"""SSDM's votes: momentum, and signs that are drawn with a probability that grows with the element."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

from collectives.annotations import Array, Doubles, override
from mpicomp.feedback.base import Problem, Residual, StateKind, StepInput, bad_ranks, compute_type
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.votes import VoteLayout, VoteValues
from mpicomp.kernels.streams import Stream, shared_source, source
from mpicomp.spaces import HOST


class _Part(NamedTuple):
    """A run of elements, its sums and its signs."""

    elements: slice
    group: int
    sums: Array
    bits: Array

    def of(self, residual: Residual | None, following: bool = False) -> Array | None:
        """Return its elements of the momentum, if there is one."""
        if residual is None:
            return None
        return (residual.following if following else residual.current)[self.elements]


class StochasticVotes(VoteValues):
    """Momentum and norms of one vector.

    Ranks exchange their norms before they draw signs, so a step that meets NaN on any rank changes nothing.

    Parameters
    ----------
    layout, groups
        As in `VoteValues`.
    rank : int
    momentum : float
        beta; 0: no momentum is kept.
    stream : Stream
        Random words of the signs.
    has_norm : bool
        Results are scaled by the largest of the ranks' norms; False: they are means of signs.
    correlated : bool
        Ranks share their random words, see `shared_source`.
    """

    def __init__(
        self,
        layout: VoteLayout,
        groups: ScaleGroups,
        rank: int,
        momentum: float,
        stream: Stream,
        has_norm: bool,
        correlated: bool,
    ) -> None:
        kind = compute_type(layout.dtype)
        self._momentum = Residual(HOST, layout.n, kind, pending=False) if momentum else None
        super().__init__(layout, groups, {} if self._momentum is None else {"momentum": self._momentum})
        self._beta, self._gain = kind(momentum), kind(1 - momentum)
        self._schedule, self._rank, self._source = stream.schedule(), rank, source(rank)
        self._stream = stream if correlated else None
        self._has_norm, self._norms = has_norm, np.zeros(groups.starts.size)  # N of each group
        self._rounded = np.zeros(groups.starts.size, kind)
        self._largest = np.finfo(kind).max
        self._parts = [
            [_Part(run.elements, run.group, self._sums[run.sums], bits[run.words(cut.start)]) for run in runs]
            for cut, bits, runs in zip(layout.pieces, layout.counts, groups.runs(layout.pieces), strict=True)
        ]
        self._step = np.uint64(0)

    @property
    def momentum(self) -> Array | None:
        """The momentum, [n]."""
        return None if self._momentum is None else self._momentum.current

    @property
    @override
    def state_kinds(self) -> dict[str, StateKind]:
        return {"momentum": "mean"}

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._step = np.uint64(call.step & 0xFFFFFFFF)
        if self._stream is not None:
            self._source = shared_source(self._stream, call.step, self._rank, self._ranks)

    @override
    def reports_first(self, step: int) -> bool:
        return True

    @override
    def measure(self) -> None:
        for part in chain.from_iterable(self._parts):
            values, momentum = self._values[part.elements], part.of(self._momentum)
            self.kernels.ssdm.squares(values, momentum, self._beta, self._gain, part.sums)

    @override
    def report(self, row: Doubles) -> None:
        finite = self._totals(self._sums, self.groups.firsts, row)
        np.sqrt(row, out=row)
        if not finite:
            self._measure_large(row)
        # rounded once; a norm beyond the largest number becomes that: it is no less than any element
        self.kernels.ssdm.round_norms(row, self._largest, self._rounded)

    def _measure_large(self, norms: Doubles) -> None:
        """Find norms of float64 groups whose squares overflow, by dividing by their largest magnitudes first."""
        for group in np.flatnonzero(~np.isfinite(norms)):
            part = slice(int(self.groups.starts[group]), int(self.groups.stops[group]))
            x = self._values[part]
            with np.errstate(over="ignore", invalid="ignore"):
                if (momentum := self.momentum) is not None:
                    x = self._beta * momentum[part] + self._gain * x
                largest = np.abs(x).max()
                if np.isfinite(largest):
                    norms[group] = min(largest * np.linalg.norm(x / largest), np.finfo(np.float64).max)
        if not np.isfinite(norms).all():
            norms[:] = self._reason()

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        own, ranks = None if self._has_norm else self._rank, self._kind(self._ranks)
        finite, representable = self.kernels.ssdm.share_norms(reports, own, ranks, self._norms, self._factors)
        if not finite:
            return Problem(bad_ranks(np.isnan(reports).any(axis=1)))
        return None if not self._has_norm or (representable and self._fits()) else Problem(quantity="the norm")

    @override
    def encode(self, piece: int) -> None:
        for part in self._parts[piece]:
            self.kernels.ssdm.stochastic_signs(
                self._schedule, np.uint64(part.elements.start), self._step, self._source,
                self._values[part.elements], part.of(self._momentum), part.of(self._momentum, following=True),
                self._beta, self._gain, self._norms[part.group], part.bits,
            )  # fmt: skip
