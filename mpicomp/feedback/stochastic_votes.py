"""SSDM's votes: momentum, and signs that are drawn with a probability that grows with the element."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from collectives.annotations import Array, Doubles, Testable, Words, override
from collectives.arrays import Device
from mpicomp.feedback.base import Problem, Residual, StepInput, bad_ranks, compute_type, copy_to_host
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.sign_blocks import BlockTable
from mpicomp.feedback.vote_values import VoteValues
from mpicomp.kernels.streams import Stream, source


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
    device, groups, pieces, counts, dtype, ranks
        As in `VoteValues`.
    rank : int
    momentum : float
        beta; 0: no momentum is kept.
    stream : Stream
        Of the signs.
    has_norm : bool
        Results are scaled by the largest of the ranks' norms; False: they are means of signs.
    """

    def __init__(
        self,
        device: Device,
        groups: ScaleGroups,
        pieces: Sequence[range],
        counts: Sequence[Words],
        dtype: str,
        ranks: int,
        rank: int,
        momentum: float,
        stream: Stream,
        has_norm: bool,
    ) -> None:
        n, kind = pieces[-1].stop if pieces else 0, compute_type(dtype)
        self._momentum = Residual(device, n, kind) if momentum else None
        residuals = {} if self._momentum is None else {"momentum": self._momentum}
        super().__init__(device, groups, pieces, counts, dtype, ranks, residuals)
        self._beta, self._gain = kind(momentum), kind(1 - momentum)
        self._schedule, self._rank, self._source = stream.schedule(), rank, source(rank)
        self._has_norm, self._norms = has_norm, np.zeros(groups.starts.size)  # N of each group
        self._blocks: BlockTable | None = None
        if not self.on_host:
            self._blocks = BlockTable(groups, pieces)
            self._blocks.send(device, self._packed.starts)
            self._factors_of_draws = Mirror(device, device.zeros(groups.starts.size, "float64"))
        self._parts = [
            [_Part(run.elements, run.group, self._sums.there[run.sums], bits[run.words(cut.start)]) for run in runs]
            for cut, bits, runs in zip(pieces, self._packed.pieces, groups.runs(pieces), strict=True)
            if self.on_host
        ]
        self._step = np.uint64(0)

    @property
    def momentum(self) -> Array | None:
        """The momentum, [n]; a tensor where vectors are on a device."""
        return None if self._momentum is None else self._momentum.current

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._step = np.uint64(call.step & 0xFFFFFFFF)

    @override
    def reports_first(self, step: int) -> bool:
        return True

    @override
    def measure(self) -> Testable | None:
        self.launch(self._square)
        return self._sums.fetch()

    def _square(self) -> None:
        if self._blocks is not None:
            terms = self.momentum, self._beta, self._gain, self._blocks.all, self._sums.there
            self.kernels.ssdm.squares_of_blocks(self._values, *terms)
            return
        for part in chain.from_iterable(self._parts):
            values, momentum = self._values[part.elements], part.of(self._momentum)
            self.kernels.ssdm.squares(values, momentum, self._beta, self._gain, part.sums)

    @override
    def report(self, row: Doubles) -> None:
        finite, kind = self._total_sums(row), self._factors.here.dtype
        np.sqrt(row, out=row)
        if not finite:
            self._measure_large(row)
        # rounded once; a norm beyond the largest number becomes that: it is no less than any element
        row[:] = np.where(np.isfinite(row), np.minimum(row, np.finfo(kind).max), row).astype(kind)

    def _measure_large(self, norms: Doubles) -> None:
        """Norms of float64 groups whose squares overflow, by dividing by their largest magnitudes first."""
        for group in np.flatnonzero(~np.isfinite(norms)):
            part = slice(int(self.groups.starts[group]), int(self.groups.stops[group]))
            x = copy_to_host(self.device, self._values[part])
            with np.errstate(over="ignore", invalid="ignore"):
                if (momentum := self.momentum) is not None:
                    x = self._beta * copy_to_host(self.device, momentum[part]) + self._gain * x
                largest = np.abs(x).max()
                if np.isfinite(largest):
                    norms[group] = min(largest * np.linalg.norm(x / largest), np.finfo(np.float64).max)
        if not np.isfinite(norms).all():
            norms[:] = self._reason()

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        if not np.isfinite(reports).all():
            return Problem(bad_ranks(np.isnan(reports).any(axis=1)))
        longest = reports.max(axis=0)
        self._norms[:] = longest if self._has_norm else reports[self._rank]
        if self._blocks is not None:
            known = self._norms > 0
            self._factors_of_draws.send(np.where(known, 2.0**31 / np.where(known, self._norms, 1), 0))
        unanimous = (longest if self._has_norm else longest > 0).astype(self._factors.here.dtype)
        representable = self._set_factors(unanimous / self._ranks)
        return None if representable or not self._has_norm else Problem(quantity="the norm")

    @override
    def encode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._draw_signs(piece)
            return None
        self.launch(self._draw_signs, piece)
        return self._packed.fetch(piece, slice(self._words[piece]))

    def _draw_signs(self, piece: int) -> None:
        if self._blocks is not None:
            self.kernels.ssdm.stochastic_signs_of_blocks(
                self._schedule, self._step, self._source, self._values, self.momentum,
                None if self._momentum is None else self._momentum.following, self._beta, self._gain,
                self._factors_of_draws.there, self._blocks.of_piece(piece), self._packed.whole,
            )  # fmt: skip
            return
        for part in self._parts[piece]:
            self.kernels.ssdm.stochastic_signs(
                self._schedule, np.uint64(part.elements.start), self._step, self._source,
                self._values[part.elements], part.of(self._momentum), part.of(self._momentum, following=True),
                self._beta, self._gain, self._norms[part.group], part.bits,
            )  # fmt: skip
