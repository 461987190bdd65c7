"""EF-signSGD's feedback: signs of the compensated vector, and one scale per group that all ranks share.

The compensated vector p is kept; s sgn(p) is subtracted while the next step is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.annotations import Doubles, FloatArray, Testable, Words, override
from collectives.arrays import Device
from mpicomp import kernels
from mpicomp.feedback.base import Problem, Residual, State, bad_ranks, compute_type
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.vote_values import STREAMING_ELEMENTS, VoteValues


class SharedScale(VoteValues):
    """Residual and scales of one vector; parameters as in `VoteValues`."""

    reports_when, decodes_with_reports = "beside", True

    def __init__(
        self,
        device: Device,
        groups: ScaleGroups,
        pieces: Sequence[range],
        counts: Sequence[Words],
        dtype: str,
        ranks: int,
    ) -> None:
        n, kind = pieces[-1].stop if pieces else 0, compute_type(dtype)
        # p of the last step: its s sgn(p) is not yet subtracted
        self._compensated = Residual(device, n, kind)
        self._blocks = [groups.blocks_in(cut) for cut in pieces]
        heads = [blocks.stop - (blocks.start or 0) for blocks in self._blocks]  # sums cross in front of signs
        super().__init__(device, groups, pieces, counts, dtype, ranks, {"residual": self._compensated}, heads)
        if not self.on_host:
            self._heads = [head.view(self._sums.there.dtype) for head in self._packed.heads]
        # s of the last step, and of this one
        self._scales, self._next_scales = (Mirror.of(device, np.zeros(groups.starts.size, kind)) for _ in range(2))

    @property
    def scales(self) -> FloatArray:
        """s of the last step, of each group: s sgn(residual) is still to be subtracted from the residual."""
        return self._scales.here.copy()

    @override
    def encode(self, piece: int) -> Testable | None:
        if self.on_host:
            self._compensate_and_pack(piece)
            return None
        self.launch(self._compensate_and_pack, piece)
        return self._packed.fetch(piece, slice(self._words[piece]))

    def _compensate_and_pack(self, piece: int) -> None:
        cut = self._pieces[piece]
        sums: tuple[Any, ...] = (self._sums.there,)
        if not self.on_host:
            sums = self._heads[piece], self._blocks[piece].start or 0
        self.kernels.ef_sign.compensate_and_pack(
            self._values, self._compensated.current, self._scales.there, self._starts, self._stops, self._firsts,
            (cut.start, cut.stop), *self._spans[piece], self._n >= STREAMING_ELEMENTS, self._compensated.following,
            self._packed.pieces[piece], *sums,
        )  # fmt: skip

    @override
    def report(self, row: Doubles) -> None:
        if not self.on_host:
            for blocks, head in zip(self._blocks, self._packed.heads_here, strict=True):
                self._sums.here[blocks] = head.view(np.float64)
        if not self._total_sums(row):
            row[:] = self._reason()

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        with np.errstate(over="ignore", invalid="ignore"):
            total = reports[0].copy()
            for row in reports[1:]:  # in rank order: all ranks get the same bits
                total += row
            scales = (total / (self.groups.lengths * self._ranks)).astype(self._scales.here.dtype)
            factors = scales / self._ranks
        self._next_scales.send(scales)
        representable = self._set_factors(factors)
        if bad := bad_ranks(np.isnan(reports).any(axis=1)):
            return Problem(bad)
        return None if representable else Problem(quantity="the scale")

    @override
    def commit(self) -> None:
        if self._begun:
            self._scales, self._next_scales = self._next_scales, self._scales
        super().commit()

    @override
    def undo(self) -> None:
        if self._committed:
            self._scales, self._next_scales = self._next_scales, self._scales
        super().undo()

    @override
    def state(self) -> State:
        state = super().state()
        scales = self._scales.here
        kernels.of("cpu").ef_sign.settle(state["residual"], scales, self.groups.starts, self.groups.stops)
        return state

    @override
    def load(self, state: State) -> str:
        self._scales.send(np.zeros_like(self._scales.here))
        return super().load(state)
