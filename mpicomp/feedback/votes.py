"""Votes of one vector: a reducer counts them on the host, and feedback turns counts into values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.annotations import Array, Words, override
from collectives.arrays.elements import NARROW, round_in_place
from mpicomp import kernels
from mpicomp.codecs.vote_counts import write_values
from mpicomp.feedback.base import Feedback, Residual, StepInput, compute_type, narrow_into
from mpicomp.feedback.scale_groups import ScaleGroups, why
from mpicomp.spaces import HOST

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches


@dataclass(frozen=True)
class VoteLayout:
    """Place and type of the votes of one vector.

    Attributes
    ----------
    pieces : sequence of range
        Elements of each piece.
    counts : sequence of uint64 arrays
        The reducer's counts of each piece.
    dtype : str
        Type of the result.
    ranks : int
    """

    pieces: Sequence[range]
    counts: Sequence[Words]
    dtype: str
    ranks: int

    @property
    def n(self) -> int:
        """Number of elements."""
        return self.pieces[-1].stop if self.pieces else 0


class Votes(Feedback):
    """Base of feedback whose ranks vote with signs.

    Parameters
    ----------
    layout : VoteLayout
    residuals : dict of str to Residual
    """

    def __init__(self, layout: VoteLayout, residuals: Mapping[str, Residual]) -> None:
        super().__init__(HOST, residuals)
        self._pieces, self._dtype, self._ranks, self._n = layout.pieces, layout.dtype, layout.ranks, layout.n
        self._words = [-(-len(cut) // 64) for cut in layout.pieces]  # of a plane of a piece's counts
        self._counts = layout.counts
        self._nothing: Array = np.empty(0)
        self._streaming = False

    @override
    def begin(self, call: StepInput) -> None:
        self._begun = True
        self._values, self._out = call.values, call.out
        if self._n >= STREAMING_ELEMENTS:
            self._streaming = call.out.ctypes.data % 32 == 0

    @override
    def end(self) -> None:
        self._begun = False
        self._values = self._out = self._target = self._nothing

    @abstractmethod
    def encode(self, piece: int) -> None:
        """Pack the signs of a piece into the first plane of its counts."""

    @abstractmethod
    def decode(self, piece: int) -> None:
        """Write a piece of the result from its complete counts."""


class VoteValues(Votes):
    """Base of EF-signSGD's and SSDM's feedback: a result is a factor times the sum of the ranks' signs.

    Parameters
    ----------
    layout : VoteLayout
    groups : ScaleGroups
        Parts of the vector with a factor each.
    residuals : dict of str to Residual
    """

    def __init__(self, layout: VoteLayout, groups: ScaleGroups, residuals: Mapping[str, Residual]) -> None:
        super().__init__(layout, residuals)
        self.groups, self.n_reports, self._kind = groups, groups.starts.size, compute_type(layout.dtype)
        self._stretches = [groups.stretches_in(cut) for cut in layout.pieces]
        self._totals = kernels.of("cpu").vote_counts.segment_totals
        self._sums = np.zeros(groups.blocks)  # of each block, for the scales
        self._factors = np.zeros(groups.starts.size, self._kind)  # of this step
        self._narrow = layout.dtype in NARROW
        self.end()

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        # 16-bit results are computed in float32 in the widened vector, whose piece is not needed any more by then
        self._target = call.out if call.wide is None else call.wide

    @override
    def decode(self, piece: int) -> None:
        cut, counts, words = self._pieces[piece], self._counts[piece], self._words[piece]
        target, groups = self._target[cut.start : cut.stop], self.groups
        where = groups.starts, groups.stops, cut.start, *self._stretches[piece]
        streaming = self._streaming and not self._narrow
        write_values(counts, words, self._ranks, self._factors, where, streaming, target)
        if self._narrow:
            narrow_into(target, self._dtype, self._out[cut.start : cut.stop])

    def _reason(self) -> float:
        """Report of a rank whose sums are not finite; see `why`."""
        return why(self.all_finite(self._values))

    def _fits(self) -> bool:
        """Return whether the largest possible result, which is finite while it is computed, is so in its own type."""
        if not self._narrow:
            return True
        largest = self._factors * self._kind(self._ranks)  # all ranks have one sign
        rounded = np.empty(largest.size, np.uint16 if self._dtype == "bfloat16" else np.float16)
        round_in_place(largest, self._dtype, rounded)
        return bool(np.isfinite(largest).all())
