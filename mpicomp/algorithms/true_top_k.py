"""True top-k: the largest elements of the exact mean. To study other choices by, not to save anything.

    I      = places of the largest |mean over ranks of (m + g)|, chunk by chunk or of all
    v      = mean over ranks of (m + g)[I]
    m      <- m + beta (g - (m + g at I, else 0))
    result = v at I, 0 elsewhere

The mean takes a dense all-reduce of the whole vector at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from collectives import Communicator, Traffic
from collectives.memory import add
from mpicomp.aggregator.base import MessageModel
from mpicomp.algorithms.dense import Dense
from mpicomp.codecs.options import chunk, flag
from mpicomp.codecs.top_k import Selector
from mpicomp.kernels.cpu.sign import all_finite
from mpicomp.kernels.cpu.sparse import expand
from mpicomp.reducers.shared_indices import Part, SharedIndices, SharedIndicesAggregator


@dataclass(frozen=True)
class TrueTopK(SharedIndices):
    """Options of true top-k.

    Parameters
    ----------
    rate, beta, warmup_steps
        As in `SharedIndices`.
    chunk, exact
        As in `ScaleCom`.

    Raises
    ------
    ValueError
        An option is out of range.
    """

    chunk: int | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        flag(self, "exact")
        if self.exact and self.chunk is not None:
            raise ValueError(f"chunk must be None with exact=True, which knows no chunks, not {self.chunk!r}")
        chunk(self, (self.rate,))

    def start(
        self,
        comm: Communicator,
        n: int,
        *,
        dtype: DTypeLike | str = np.float32,
        vector_id: int = 0,
        tensor_lengths: Sequence[int] | None = None,
    ) -> TrueTopKAggregator:
        """See `Algorithm.start`; tensor_lengths play no part."""
        return TrueTopKAggregator(self, comm, n, dtype, vector_id, tensor_lengths)

    def message_model(self, n: int, dtype: str, ranks: int, piece_bytes: int) -> MessageModel:
        """See `Algorithm.message_model`: all elements travel in full precision; the few others do not count."""
        return Dense().message_model(n, "float64" if dtype == "float64" else "float32", ranks, piece_bytes)


class TrueTopKAggregator(SharedIndicesAggregator):
    """Residual and buffers for one vector."""

    def __init__(
        self,
        options: TrueTopK,
        comm: Communicator,
        n: int,
        dtype: DTypeLike | str,
        vector_id: int,
        tensor_lengths: Sequence[int] | None,
    ) -> None:
        super().__init__(
            options, comm, n, dtype, vector_id, tensor_lengths, (options.rate,), options.chunk, options.exact
        )
        self._chooser = TrueChoice(comm, self.parts, n, self._compute)


class TrueChoice:
    """The largest of the exact mean; see `Chooser`."""

    def __init__(self, comm: Communicator, parts: Sequence[Part], n: int, dtype: np.dtype[Any]) -> None:
        self._comm, self._parts = comm, parts
        self._mean = np.empty(n, dtype)
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)

    def choose(
        self, step: int, values: NDArray[Any], residual: NDArray[Any], places: NDArray[np.int64], traffic: Traffic
    ) -> bool:
        """See `Chooser`."""
        clock = traffic.clock
        start = clock()
        add(values, residual, self._mean)
        finite = bool(all_finite(self._mean))
        added = clock()
        self._comm.dense(self._mean, self._mean.dtype.name, True, self._mean, traffic)
        summed = clock()
        for part in self._parts:
            count = part.last - part.first
            indices = self._indices[:count]
            select = self._selectors[part.chunk, part.keep]
            select(self._mean[part.elements], None, indices, self._found[:count])
            expand(indices, part.chunk, part.keep, part.start, part.stop, places[part.values])
        spent = clock() - summed + added - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        return finite
