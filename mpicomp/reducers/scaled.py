"""Methods whose result is a factor times the sum of the ranks' signs, each stretch of the vector with its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import DTypeLike

from collectives import Communicator
from collectives.execution.program import Program
from collectives.memory import narrow, widen
from mpicomp.aggregator.base import Algorithm
from mpicomp.codecs.scale_groups import ScaleGroups
from mpicomp.codecs.vote_counts import write_values
from mpicomp.reducers.sign_merge import Encode
from mpicomp.reducers.vote_count import VoteCountAggregator, VoteCountPayload


class ScaledAggregator(VoteCountAggregator):
    """Base of such methods.

    Parameters
    ----------
    algorithm, comm, n, dtype, vector_id, tensor_lengths, payload
        As in `VoteCountAggregator`.
    bucket : int, optional
        Elements of a stretch, counted from the start of each segment; the last may be short. None: a segment is one.

    Attributes
    ----------
    stretches : ScaleGroups
    factors : float32[stretches] or float64[stretches]
        Of this step.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
        payload: Callable[[Program, Encode, Encode], VoteCountPayload] = VoteCountPayload,
        bucket: int | None = None,
    ) -> None:
        super().__init__(algorithm, comm, n, dtype, vector_id, tensor_lengths, payload)
        self.stretches = ScaleGroups.of(tensor_lengths, n, bucket)
        self._sums = np.zeros(self.stretches.blocks)
        self._spans = [self.stretches.span(cut) for cut in self._program.pieces]
        self.factors = np.zeros(self.stretches.starts.size, self._compute)

    def _finish(self, piece: int) -> None:
        counts, words, cut = self._payload.counts[piece], self._payload.words[piece], self._program.pieces[piece]
        target = self._target[cut.start : cut.stop]
        starts, stops = self.stretches.starts, self.stretches.stops
        where = starts, stops, cut.start, *self._spans[piece]
        write_values(counts, words, self.comm.size, self.factors, where, self._streaming, target)
        if self._wide is not None:
            narrow(target, self.dtype, self._out[cut.start : cut.stop])

    def _representable(self) -> bool:
        """Whether the largest result, where all ranks have one sign, is finite in the results' type."""
        with np.errstate(over="ignore"):
            largest = self.factors * self._compute.type(self.comm.size)
        if self._wide is not None:
            rounded = np.empty(largest.size, self._result_dtype)
            narrow(largest, self.dtype, rounded)
            widen(rounded, self.dtype, largest)
        return bool(np.isfinite(largest).all())
