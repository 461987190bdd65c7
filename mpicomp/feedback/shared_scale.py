"""EF-signSGD's feedback: signs of the compensated vector, and one scale per group that all ranks share.

The compensated vector p is kept; s sgn(p) is subtracted while the next step is encoded.
"""

from __future__ import annotations

import numpy as np

from collectives.annotations import Doubles, FloatArray, override
from mpicomp.feedback.base import Problem, Residual, State, bad_ranks, compute_type
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.votes import STREAMING_ELEMENTS, VoteLayout, VoteValues
from mpicomp.spaces import HOST


class SharedScale(VoteValues):
    """Residual and scales of one vector; parameters as in `VoteValues`."""

    reports_when, decodes_with_reports = "beside", True

    def __init__(self, layout: VoteLayout, groups: ScaleGroups) -> None:
        # p of the last step: its s sgn(p) is not yet subtracted
        self._compensated = Residual(HOST, layout.n, compute_type(layout.dtype))
        super().__init__(layout, groups, {"residual": self._compensated})
        # s of the last step, and of this one
        self._scales, self._next_scales = (np.zeros(groups.starts.size, self._kind) for _ in range(2))
        self._elements = np.maximum(1.0, groups.lengths * layout.ranks)

    @property
    def scales(self) -> FloatArray:
        """s of the last step, of each group: s sgn(residual) is still to be subtracted from the residual."""
        return self._scales.copy()

    @override
    def encode(self, piece: int) -> None:
        cut, groups = self._pieces[piece], self.groups
        self.kernels.ef_sign.compensate_and_pack(
            self._values, self._compensated.current, self._scales, groups.starts, groups.stops, groups.firsts,
            (cut.start, cut.stop), *self._stretches[piece], self._n >= STREAMING_ELEMENTS, self._compensated.following,
            self._counts[piece], self._sums,
        )  # fmt: skip

    @override
    def report(self, row: Doubles) -> None:
        if not self._totals(self._sums, self.groups.firsts, row):
            row[:] = self._reason()

    @override
    def adopt(self, reports: Doubles) -> Problem | None:
        share, ranks = self.kernels.ef_sign.share, self._kind(self._ranks)
        if share(reports, self._elements, ranks, self._next_scales, self._factors) and self._fits():
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
        self.kernels.ef_sign.settle(state["residual"], self._scales, self.groups.starts, self.groups.stops)
        return state

    @override
    def load(self, state: State) -> str:
        self._scales[:] = 0
        return super().load(state)
