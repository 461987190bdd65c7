"""Random-k: all ranks draw the same elements, and send nothing but their values.

    I      = one element of each `rate`, drawn alike on all ranks
    v      = mean over ranks of (m + g)[I]
    m      <- m + beta (g - (m + g at I, else 0))
    result = v at I, 0 elsewhere

Values are not scaled up: the residual m makes up for what is left out. What any choice of shared indices is to be
compared with.

Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from mpicomp.aggregator.base import MessageModel
from mpicomp.codecs.options import integer
from mpicomp.kernels.cpu.sparse import draw_strata, finite_sum
from mpicomp.kernels.streams import Stream, source
from mpicomp.reducers.shared_indices import Part, SharedIndices, SharedIndicesAggregator, shared_wire


@dataclass(frozen=True)
class RandomK(SharedIndices):
    """Options of random-k.

    Parameters
    ----------
    rate, beta, warmup_steps
        As in `SharedIndices`.
    seed : int
        Of the indices; equal on all ranks.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(self, "seed")

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> RandomKAggregator:
        """See `Algorithm.start`; tensor_lengths play no part."""
        return RandomKAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`."""
        return shared_wire(n, dtype, ranks, piece_bytes, self.rate, 1, 0)


class RandomKAggregator(SharedIndicesAggregator):
    """Residual and buffers for one vector."""

    def __init__(
        self,
        options: RandomK,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        super().__init__(options, comm, n, dtype, vector_id, tensor_lengths, (options.rate,), None)
        self._chooser = Drawn(self.parts, Stream(options.seed, vector_id, "indices"))


class Drawn:
    """One place of each chunk, drawn; see `Chooser`."""

    def __init__(self, parts: Sequence[Part], stream: Stream) -> None:
        self._parts, self._schedule = parts, stream.schedule()
        self._source = source(0)  # no rank's: all draw alike

    def choose(
        self, step: int, values: NDArray[Any], residual: NDArray[Any], places: NDArray[np.int64], traffic: Traffic
    ) -> bool:
        """See `Chooser`."""
        start = traffic.clock()
        at, finite = np.uint64(step & 0xFFFFFFFF), True
        for part in self._parts:
            limits = part.chunk, part.start, part.stop
            draw_strata(self._schedule, part.first, at, self._source, *limits, places[part.values])
            finite &= bool(finite_sum(values[part.elements], residual[part.elements]))
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        return finite
