"""Values of vote counts: a factor times the sum of the ranks' signs, with one factor for each scale group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from collectives.annotations import Array, Doubles, FloatArray, Testable, Words, override
from collectives.arrays import Device
from collectives.arrays.elements import SIXTEEN_BIT, narrow, widen
from mpicomp import kernels
from mpicomp.codecs.vote_counts import planes_of, write_values
from mpicomp.feedback.base import Feedback, Residual, StepInput, compute_type, narrow_into, words_of, zeros
from mpicomp.feedback.mirror import Mirror, Packed
from mpicomp.feedback.scale_groups import ScaleGroups, why

STREAMING_ELEMENTS = 4 << 20  # vectors this long are written past the caches


class VoteValues(Feedback):
    """Base of EF-signSGD's and SSDM's feedback: votes of one vector are counted on the host, and become values here.

    Parameters
    ----------
    device : Device
        Where vectors are; counts are in the host's memory.
    groups : ScaleGroups
    pieces : sequence of range
        Elements of each piece.
    counts : sequence of uint64 arrays
        The reducer's counts of each piece.
    dtype : str
        Of the result.
    ranks : int
    residuals : dict of str to Residual
    heads : sequence of int, optional
        As in `Packed`.
    """

    def __init__(
        self,
        device: Device,
        groups: ScaleGroups,
        pieces: Sequence[range],
        counts: Sequence[Words],
        dtype: str,
        ranks: int,
        residuals: Mapping[str, Residual],
        heads: Sequence[int] | None = None,
    ) -> None:
        super().__init__(device, residuals)
        self.groups, self._pieces, self._dtype, self._ranks = groups, pieces, dtype, ranks
        self.n_reports = groups.starts.size
        self._n = pieces[-1].stop if pieces else 0
        self._spans = [groups.span(cut) for cut in pieces]
        self._words = [-(-len(cut) // 64) for cut in pieces]  # of a plane of a piece's counts
        self._packed = Packed(device, counts, heads)
        kind = compute_type(dtype)
        self._sums = Mirror(device, zeros(device, groups.blocks, np.float64))  # of each block, for the scales
        # kept as mirrors: their memory of the host must live until it is copied
        self._tables = [Mirror.of(device, table) for table in (groups.starts, groups.stops, groups.firsts)]
        self._starts, self._stops, self._firsts = (table.there for table in self._tables)
        self._factors = Mirror(device, zeros(device, groups.starts.size, kind))  # of this step
        self._narrow, self._streaming = dtype in SIXTEEN_BIT, False
        self._nothing: Array = np.empty(0, kind)
        self.end()

    @override
    def begin(self, call: StepInput) -> None:
        super().begin(call)
        self._values, self._out = call.values, call.out
        # 16-bit results are computed in float32 in the widened vector, whose piece is not needed any more by then
        self._target = call.out if call.wide is None else call.wide
        if not self.on_host:
            self._out = words_of(self.device, call.out)
        elif not self._narrow and self._n >= STREAMING_ELEMENTS:
            self._streaming = call.out.ctypes.data % 32 == 0

    @override
    def end(self) -> None:
        super().end()
        self._values = self._out = self._target = self._nothing
        self._streaming = False

    @override
    def decode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._write_values(piece)
            return None
        self._packed.deliver(piece)
        self.launch(self._write_values, piece)
        return self.device.done()

    def _write_values(self, piece: int) -> None:
        cut = self._pieces[piece]
        target, counts, words = self._target[cut.start : cut.stop], self._packed.pieces[piece], self._words[piece]
        where = self._starts, self._stops, cut.start, *self._spans[piece]
        factors = self._factors.there
        if self.on_host:
            write_values(counts, words, self._ranks, factors, where, self._streaming, target)
        else:
            planes = planes_of(self._ranks)
            self.kernels.vote_counts.few_values(
                counts, planes, words, None, -self._ranks, factors, *where, False, target
            )
        if self._narrow:
            narrow_into(target, self._dtype, self._out[cut.start : cut.stop])

    def _total_sums(self, row: Doubles) -> bool:
        """Write the sum of each group's blocks; returns whether all are finite."""
        totals = kernels.of("cpu").vote_counts.segment_totals
        return bool(totals(self._sums.here, self.groups.firsts, row))

    def _reason(self) -> float:
        """Report of a rank whose sums are not finite; see `why`."""
        return why(self.all_finite(self._values))

    def _set_factors(self, factors: FloatArray) -> bool:
        """Fix the factors of this step; returns whether the largest possible result is finite in the result's type."""
        self._factors.send(factors)
        with np.errstate(over="ignore"):
            largest = factors * factors.dtype.type(self._ranks)  # all ranks have one sign
        if self._narrow:
            rounded = np.empty(largest.size, np.uint16 if self._dtype == "bfloat16" else np.float16)
            narrow(largest, self._dtype, rounded)
            widen(rounded, self._dtype, largest)
        return bool(np.isfinite(largest).all())
