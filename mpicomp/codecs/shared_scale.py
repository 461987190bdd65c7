"""EF-signSGD's feedback: signs of what is compensated, and one scale per group that all ranks share.

What is kept is p, the compensated vector; s sgn(p) is subtracted while the next step is encoded. The vector before the
last change is kept beside the new one, so that a step that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.memory import aligned_empty
from mpicomp import kernels
from mpicomp.codecs.reasons import tell_why
from mpicomp.codecs.scale_groups import ScaleGroups
from mpicomp.codecs.scaled_votes import STREAMING_ELEMENTS, ScaledVotes


class SharedScale:
    """The residual and the scales of one vector.

    Parameters
    ----------
    groups : ScaleGroups
    pieces : sequence of range
        Elements of each piece.
    dtype, ranks, device
        Of the vector.

    Attributes
    ----------
    scales : float32[groups] or float64[groups]
        s of the last step; s sgn(kept) is still to be subtracted from what is kept.
    """

    state_kinds: ClassVar[dict[str, Any]] = {"residual": "mean"}
    state_nan: ClassVar[str] = ""

    def __init__(
        self, groups: ScaleGroups, pieces: Sequence[range], dtype: str, ranks: int, device: str = "cpu"
    ) -> None:
        self._kernels = kernels.of(device)
        self.groups, self._pieces, self._ranks = groups, pieces, ranks
        self._votes = ScaledVotes(groups, pieces, dtype, ranks)
        kind = self._votes.factors.dtype
        self._kept, self._next = (aligned_empty(self._votes.n, kind) for _ in range(2))
        self._kept[:] = 0
        self._next[:] = 0
        self.scales = np.zeros_like(self._votes.factors)
        self._new_scales = self.scales
        self._nothing = self._values = np.empty(0, kind)

    @property
    def residual(self) -> NDArray[Any]:
        """What is kept, before the last scale is subtracted."""
        return self._kept

    def check_ready(self) -> None:
        """See `Feedback`: always ready."""

    def begin(self, values: NDArray[Any], out: NDArray[Any], wide: NDArray[Any] | None) -> None:
        """Go to another vector."""
        self._values = values
        self._votes.begin(out, wide)

    def end(self) -> None:
        """Drop the references to the caller's arrays, so that these can be freed."""
        self._values = self._nothing
        self._votes.end()

    def commit(self) -> None:
        """The step is good on all ranks."""
        if self._values is not self._nothing:
            self._kept, self._next, self.scales = self._next, self._kept, self._new_scales
        self.end()

    def encode(self, piece: int, counts: NDArray[np.uint64]) -> None:
        """Write the signs of this rank's piece."""
        cut, where, votes = self._pieces[piece], self.groups, self._votes
        self._kernels.ef_sign.compensate_and_pack(
            self._values, self._kept, self.scales, where.starts, where.stops, where.firsts, (cut.start, cut.stop),
            *votes.spans[piece], votes.n >= STREAMING_ELEMENTS, self._next, counts, votes.sums,
        )  # fmt: skip

    def finish(self, piece: int, counts: NDArray[np.uint64], words: int) -> None:
        """Write the values of a piece's complete counts."""
        self._votes.finish(piece, counts, words)

    def report(self, row: NDArray[np.float64]) -> None:
        """Fill in this rank's norms."""
        if not self._kernels.vote_counts.segment_totals(self._votes.sums, self.groups.firsts, row):
            tell_why(row, self._values)

    def take_scales(self, norms: NDArray[np.float64]) -> bool:
        """Make scales of the ranks' norms, added up in rank order; False if a result would not be finite."""
        kind, factors = self._votes.factors.dtype, self._votes.factors
        with np.errstate(over="ignore", invalid="ignore"):
            total = norms[0].copy()
            for row in norms[1:]:
                total += row
            means = total / (self.groups.lengths * self._ranks)
            self._new_scales = means.astype(kind)
            factors[:] = self._new_scales / self._ranks
        return self._votes.representable()

    def state(self) -> dict[str, NDArray[Any]]:
        """The residual, with nothing left to be subtracted; a copy."""
        residual = self._kept.copy()
        self._kernels.ef_sign.settle(residual, self.scales, self.groups.starts, self.groups.stops)
        return {"residual": residual}

    def like(self) -> dict[str, NDArray[Any]]:
        """See `Feedback`."""
        return {"residual": self._kept}

    def load(self, state: dict[str, NDArray[Any]]) -> str:
        """See `Feedback`."""
        self._kept[:] = state["residual"]
        self.scales = np.zeros_like(self.scales)
        return ""
