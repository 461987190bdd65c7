"""EF-signSGD's feedback: signs of the compensated vector, and one scale per group that all ranks share.

The compensated vector p is kept; s sgn(p) is subtracted while the next step is encoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.annotations import Doubles, FloatArray, override
from mpicomp import kernels
from mpicomp.feedback.base import Problem, Residual, State, bad_ranks, compute_type
from mpicomp.feedback.mirror import Mirror
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.votes import STREAMING_ELEMENTS, VoteLayout, VoteValues


class SharedScale(VoteValues):
    """Residual and scales of one vector; parameters as in `VoteValues`."""

    reports_when, decodes_with_reports = "beside", True

    def __init__(self, layout: VoteLayout, groups: ScaleGroups) -> None:
        # p of the last step: its s sgn(p) is not yet subtracted
        self._compensated = Residual(layout.device, layout.n, compute_type(layout.dtype))
        self._blocks, self._share = [groups.blocks_in(cut) for cut in layout.pieces], kernels.of("cpu").ef_sign.share
        heads = [blocks.stop - (blocks.start or 0) for blocks in self._blocks]  # sums cross in front of signs
        super().__init__(layout, groups, {"residual": self._compensated}, heads)
        if not self.on_host:
            self._heads = [head.view(self._sums.there.dtype) for head in self._packed.heads]
        # s of the last step, and of this one
        self._scales, self._next_scales = (
            Mirror.of(layout.device, np.zeros(groups.starts.size, self._kind)) for _ in range(2)
        )
        self._elements = np.maximum(1.0, groups.lengths * layout.ranks)

    @property
    def scales(self) -> FloatArray:
        """s of the last step, of each group: s sgn(residual) is still to be subtracted from the residual."""
        return self._scales.here.copy()

    @override
    def _write_signs(self, piece: int) -> None:
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
        if not self._totals(self._sums.here, self.groups.firsts, row):
            row[:] = self._reason()

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        scales, ranks = self._next_scales, self._kind(self._ranks)
        finite = self._share(reports, self._elements, ranks, scales.here, self._factors.here)
        scales.deliver()
        if self._send_factors(finite):
            return None
        if bad := bad_ranks(np.isnan(reports).any(axis=1)):
            return Problem(bad)
        return Problem(quantity="the scale")

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
