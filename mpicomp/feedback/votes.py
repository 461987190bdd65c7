"""Votes of one vector: a reducer counts them on the host, and feedback turns counts into values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.annotations import Array, FloatArray, Testable, Words, override
from collectives.arrays import Device
from collectives.arrays.elements import SIXTEEN_BIT, narrow, widen
from mpicomp import kernels
from mpicomp.codecs.vote_counts import planes_of, write_values
from mpicomp.feedback.base import Feedback, Residual, StepInput, compute_type, narrow_into, words_of, zeros
from mpicomp.feedback.mirror import ALL, Mirror, Packed
from mpicomp.feedback.scale_groups import ScaleGroups, why

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches


@dataclass(frozen=True)
class VoteLayout:
    """Place and type of the votes of one vector.

    Attributes
    ----------
    device : Device
        Where vectors are; counts are in the host's memory.
    pieces : sequence of range
        Elements of each piece.
    counts : sequence of uint64 arrays
        The reducer's counts of each piece.
    dtype : str
        Type of the result.
    ranks : int
    """

    device: Device
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
    heads : sequence of int, optional
        As in `Packed`.
    """

    has_decided_bits = False  # complete counts are one bit each, in the first plane

    def __init__(
        self, layout: VoteLayout, residuals: Mapping[str, Residual], heads: Sequence[int] | None = None
    ) -> None:
        super().__init__(layout.device, residuals)
        self._pieces, self._dtype, self._ranks, self._n = layout.pieces, layout.dtype, layout.ranks, layout.n
        self._words = [-(-len(cut) // 64) for cut in layout.pieces]  # of a plane of a piece's counts
        self._packed = Packed(layout.device, layout.counts, heads)
        self._nothing: Array = np.empty(0)
        self._streaming = False

    @override
    def begin(self, call: StepInput) -> None:
        self._begun = True
        self._values, out = call.values, call.out
        self._out = self._target = out if self.on_host else words_of(self.device, out)
        if self._n >= STREAMING_ELEMENTS and self.on_host:
            self._streaming = out.ctypes.data % 32 == 0

    @override
    def end(self) -> None:
        self._begun = False
        self._values = self._out = self._target = self._nothing

    @override
    def encode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._write_signs(piece)
            return None
        self.launch(self._write_signs, piece)
        return self._packed.fetch(piece, slice(self._words[piece]))

    @abstractmethod
    def _write_signs(self, piece: int) -> None:
        """Pack the signs of a piece into the first plane of its counts."""

    @override
    def decode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._write_result(piece, self._target, self._out)
            return None
        self._packed.deliver(piece, slice(self._words[piece]) if self.has_decided_bits else ALL)
        self.launch(self._write_result, piece, self._target, self._out)
        return self.device.done()

    @abstractmethod
    def _write_result(self, piece: int, target: Array, out: Array) -> None:
        """Write a piece of the result `out` from its complete counts, of 16 bits by way of `target`."""


class VoteValues(Votes):
    """Base of EF-signSGD's and SSDM's feedback: a result is a factor times the sum of the ranks' signs.

    Parameters
    ----------
    layout : VoteLayout
    groups : ScaleGroups
        Parts of the vector with a factor each.
    residuals : dict of str to Residual
    heads : sequence of int, optional
        As in `Packed`.
    """

    def __init__(
        self,
        layout: VoteLayout,
        groups: ScaleGroups,
        residuals: Mapping[str, Residual],
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout, residuals, heads)
        device, kind = layout.device, compute_type(layout.dtype)
        self.groups, self.n_reports, self._kind = groups, groups.starts.size, kind
        self._spans = [groups.span(cut) for cut in layout.pieces]
        self._totals = kernels.of("cpu").vote_counts.segment_totals
        self._sums = Mirror(device, zeros(device, groups.blocks, np.float64))  # of each block, for the scales
        # kept as mirrors: their memory of the host must live until it is copied
        self._tables = [Mirror.of(device, table) for table in (groups.starts, groups.stops, groups.firsts)]
        self._starts, self._stops, self._firsts = (table.there for table in self._tables)
        self._factors = Mirror(device, zeros(device, groups.starts.size, kind))  # of this step
        self._narrow = layout.dtype in SIXTEEN_BIT
        self.end()

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        # 16-bit results are computed in float32 in the widened vector, whose piece is not needed any more by then
        self._target = call.out if call.wide is None else call.wide

    @override
    def _write_result(self, piece: int, target: Array, out: Array) -> None:
        cut = self._pieces[piece]
        target, counts, words = target[cut.start : cut.stop], self._packed.pieces[piece], self._words[piece]
        where, factors = (self._starts, self._stops, cut.start, *self._spans[piece]), self._factors.there
        if self.on_host:
            write_values(counts, words, self._ranks, factors, where, self._streaming and not self._narrow, target)
        else:
            planes = planes_of(self._ranks)
            self.kernels.vote_counts.few_values(
                counts, planes, words, None, -self._ranks, factors, *where, False, target
            )
        if self._narrow:
            narrow_into(target, self._dtype, out[cut.start : cut.stop])

    def _reason(self) -> float:
        """Report of a rank whose sums are not finite; see `why`."""
        return why(self.all_finite(self._values))

    def _send_factors(self, finite: bool) -> bool:
        """Have kernels find the factors; return whether the largest possible result is finite in the result's type.

        finite : it is finite in the type of computing.
        """
        self._factors.deliver()
        return finite and (not self._narrow or self._fits_sixteen_bits(self._factors.here))

    def _fits_sixteen_bits(self, factors: FloatArray) -> bool:
        largest = factors * factors.dtype.type(self._ranks)  # all ranks have one sign
        rounded = np.empty(largest.size, np.uint16 if self._dtype == "bfloat16" else np.float16)
        narrow(largest, self._dtype, rounded)
        widen(rounded, self._dtype, largest)
        return bool(np.isfinite(largest).all())
