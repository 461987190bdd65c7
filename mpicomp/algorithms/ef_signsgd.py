"""EF-signSGD under all-reduce: signs counted, one scale for all ranks, and a residual that keeps what they miss.

Per step and bucket of D elements, with g this rank's gradient and e its residual:

    p = g + e,   s = mean over ranks of ||p||_1 / D,   result = s * mean over ranks of sgn(p),   e = p - s sgn(p)

The ranks' norms travel beside the signs, not before them: s is needed only to make values of the counts. What is kept
is p; s sgn(p) is subtracted while the next step is encoded.

Departure from the paper: its workers have a scale each, which counts cannot carry. With one scale for all, this is the
scaled sign of the ranks' vectors put end to end, so the sum over ranks of ||e||^2 is that of ||p||^2 less M D s^2:
compression is still a contraction, which is what error feedback asks for.

Reference: S. P. Karimireddy, Q. Rebjock, S. U. Stich and M. Jaggi, "Error feedback fixes signSGD and other gradient
compression schemes", ICML (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, NonFiniteGradient
from collectives.memory import aligned_empty
from mpicomp.aggregator import nonfinite
from mpicomp.aggregator.base import MessageModel, StateKind, Synchronize, VectorAggregator
from mpicomp.codecs.options import integer
from mpicomp.codecs.vote_counts import Counts
from mpicomp.kernels.cpu.ef_sign import compensate_and_pack, settle
from mpicomp.kernels.cpu.vote_counts import segment_totals
from mpicomp.reducers.scaled import ScaledAggregator
from mpicomp.reducers.sign_merge import SideChannel
from mpicomp.reducers.vote_count import STREAMING_ELEMENTS, counts_wire


@dataclass(frozen=True)
class EFSignSGD:
    """Options of EF-signSGD.

    Parameters
    ----------
    bucket : int or None
        Elements that share a scale, at least 1, counted from the start of each segment; the last may be fewer. None:
        the whole segment, or vector.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    bucket: int | None = None

    synchronize: ClassVar[Synchronize] = "gradients"
    uses_tensor_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        integer(self, "bucket", 1, also=(None,))

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> EFSignSGDAggregator:
        """See `Algorithm.start`."""
        return EFSignSGDAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`; the scales, which go once to every rank, are spread over both phases."""
        counts, bucket = Counts(), self.bucket

        def nbytes(elements: int, weight: int) -> int:
            scales = 0 if bucket is None else 4 * ranks * -(-elements // bucket)
            return counts.nbytes(elements, weight) + scales

        return counts_wire(n, ranks, piece_bytes, nbytes)


class EFSignSGDAggregator(ScaledAggregator):
    """Residual, step counter and buffers for one vector.

    The vector before the residual's last change is kept beside the new one, so that a step that meets NaN on any rank
    changes nothing: two arrays, and as much to read and write as with one.

    Attributes
    ----------
    scales : float32[buckets] or float64[buckets]
        s of the last step.
    """

    state_kinds: ClassVar[dict[str, StateKind]] = {**VectorAggregator.state_kinds, "residual": "mean"}

    def __init__(
        self,
        options: EFSignSGD,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id, tensor_lengths, bucket=options.bucket)
        self._kept, self._next = (aligned_empty(n, self._compute) for _ in range(2))
        self._kept[:] = 0
        self._next[:] = 0
        # s sgn(kept) is still to be subtracted from what is kept; 0: nothing is
        self.scales = np.zeros_like(self.factors)
        self._new_scales: NDArray[Any] | None = None  # None: not known yet
        self._problem: NonFiniteGradient | None = None
        self._side_channel = SideChannel(comm, self.factors.size)
        self._counted: list[int] = []  # pieces whose counts were there before the scales

    # One step --------------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._new_scales, self._problem, self._counted = None, None, []
        self._travel(self._encoded)
        if self._new_scales is None:
            self._take_scales()
        assert self._new_scales is not None
        if self._problem is not None:
            raise self._problem
        start = self._traffic.clock()
        for piece in self._counted:
            super()._finish(piece)
        seconds = self._traffic.clock() - start
        self._traffic.seconds_decoding += seconds
        self._traffic.seconds_total += seconds
        self._kept, self._next, self.scales = self._next, self._kept, self._new_scales

    def _encode(self, piece: int) -> None:
        cut, where = self._program.pieces[piece], self.stretches
        compensate_and_pack(
            self._values, self._kept, self.scales, where.starts, where.stops, where.firsts, (cut.start, cut.stop),
            *self._spans[piece], self.n >= STREAMING_ELEMENTS, self._next, self._payload.counts[piece], self._sums,
        )  # fmt: skip

    def _encoded(self) -> None:
        """Send this rank's norms while the signs are still travelling."""
        mine = self._side_channel.mine
        if not segment_totals(self._sums, self.stretches.firsts, mine):
            nonfinite.tell_why(mine, self._values)
        self._side_channel.start()

    def _finish(self, piece: int) -> None:
        if self._new_scales is None and self._side_channel.arrived():
            self._take_scales()
        if self._new_scales is None or self._problem is not None:
            self._counted.append(piece)
        else:
            super()._finish(piece)

    def _take_scales(self) -> None:
        """Make scales of the ranks' norms, added up in rank order; messages may still be in flight, so do not raise."""
        self._side_channel.collect(self._traffic)
        norms, size = self._side_channel.everyones, self.comm.size
        where = f"vector {self.vector_id}, step {self.step}"
        bad = nonfinite.bad_ranks(norms)
        with np.errstate(over="ignore", invalid="ignore"):
            total = norms[0].copy()
            for row in norms[1:]:
                total += row
            means = total / (self.stretches.lengths * size)
            self._new_scales = means.astype(self._compute)
            self.factors[:] = self._new_scales / size
        if bad:
            self._problem = nonfinite.error(self.comm, bad, where)
        elif not self._representable():
            self._problem = nonfinite.error(self.comm, (), f"the scale of {where}")

    # State -----------------------------------------------------------------------------------------------------------

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {"residual": self._kept}

    def state_dict(self) -> dict[str, Any]:
        """Step counter and residual, with nothing left to be subtracted."""
        residual = self._kept.copy()
        settle(residual, self.scales, self.stretches.starts, self.stretches.stops)
        return self._state(residual=residual)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `VectorAggregator`."""
        super().load_state_dict(state)
        self.scales = np.zeros_like(self.scales)
