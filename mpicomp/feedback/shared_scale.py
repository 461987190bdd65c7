"""EF-signSGD's feedback: signs of what is compensated, and one scale per group that all ranks share.

What is kept is p, the compensated vector; s sgn(p) is subtracted while the next step is encoded. The vector before the
last change is kept beside the new one, so that a step that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.testable import Testable
from mpicomp import kernels
from mpicomp.feedback.scale_groups import ScaleGroups, why
from mpicomp.feedback.scaled_votes import STREAMING_ELEMENTS, ScaledVotes


class SharedScale(ScaledVotes):
    """The residual and the scales of one vector; parameters as in `ScaledVotes`.

    Attributes
    ----------
    residual : ndarray[n]
        What is kept, before the last scale is subtracted.
    scales : float32[groups] or float64[groups]
        s of the last step; s sgn(residual) is still to be subtracted from the residual.
    """

    def __init__(
        self, groups: ScaleGroups, pieces: Sequence[range], dtype: str, ranks: int, device: str = "cpu"
    ) -> None:
        super().__init__(groups, pieces, dtype, ranks, device)
        self.residual, self._next = (self._zeros(self._n, self._factors.dtype) for _ in range(2))
        self._tables: tuple[Any, Any, Any] = groups.starts, groups.stops, groups.firsts
        self.scales = self._new_scales = np.zeros_like(self._factors)

    def commit(self) -> None:
        """The step is good on all ranks."""
        if self._values is not self._nothing:
            self.residual, self._next, self.scales = self._next, self.residual, self._new_scales
        self.end()

    def encode(self, piece: int) -> Testable | None:
        """Write the signs of this rank's piece; see `SignFeedback`."""
        self._encode(piece, self.scales)
        return None

    def _encode(self, piece: int, scales: Any) -> None:
        cut = self._pieces[piece]
        self._kernels.ef_sign.compensate_and_pack(
            self._values, self.residual, scales, *self._tables, (cut.start, cut.stop), *self._spans[piece],
            self._n >= STREAMING_ELEMENTS, self._next, self._counts[piece], self._sums,
        )  # fmt: skip

    def report(self, row: NDArray[np.float64]) -> None:
        """Fill in this rank's norms."""
        if not kernels.of("cpu").vote_counts.segment_totals(self._host_sums, self.groups.firsts, row):
            row[:] = why(self.all_finite(self._values))

    def take_scales(self, norms: NDArray[np.float64]) -> bool:
        """Make scales of the ranks' norms, added up in rank order; False if a result would not be finite."""
        with np.errstate(over="ignore", invalid="ignore"):
            total = norms[0].copy()
            for row in norms[1:]:
                total += row
            means = total / (self.groups.lengths * self._ranks)
            self._new_scales = means.astype(self._factors.dtype)
            self._factors[:] = self._new_scales / self._ranks
        return self._representable()

    def state(self) -> dict[str, NDArray[Any]]:
        """The residual, with nothing left to be subtracted; a copy."""
        state = super().state()
        kernels.of("cpu").ef_sign.settle(state["residual"], self.scales, self.groups.starts, self.groups.stops)
        return state

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        self.scales = np.zeros_like(self.scales)
        return super().load(state)
