"""Places of the largest elements of the exact mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.memory import add
from mpicomp import kernels
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.nonfinite import all_finite
from mpicomp.codecs.memory import Part
from mpicomp.codecs.top_k import Selector


class TrueChoice:
    """The largest of the exact mean; see `Chooser`."""

    def __init__(self, parts: Sequence[Part], n: int, dtype: np.dtype[Any]) -> None:
        self._parts, self._expand = parts, kernels.of("cpu").sparse.expand
        self._mean = np.empty(n, dtype)
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)
        self.finite = True

    def choose(self, call: VectorCall, residual: NDArray[Any], places: NDArray[np.int64]) -> Iterator[bool]:
        """See `Chooser`."""
        traffic = call.traffic
        clock = traffic.clock
        start = clock()
        add(call.values, residual, self._mean)
        self.finite = all_finite(self._mean)
        added = clock()
        yield from call.comm.dense_steps(call, self._mean, self._mean.dtype.name, True, self._mean, traffic)
        summed = clock()
        for part in self._parts:
            count = part.last - part.first
            indices = self._indices[:count]
            select = self._selectors[part.chunk, part.keep]
            select(self._mean[part.elements], None, indices, self._found[:count])
            self._expand(indices, part.chunk, part.keep, part.start, part.stop, places[part.values])
        spent = clock() - summed + added - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent

    def end(self) -> None:
        """See `Chooser`: nothing of the caller's is kept."""
