"""Places of the largest elements of the exact mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from collectives.memory import add
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.nonfinite import all_finite
from mpicomp.codecs.memory import Memory
from mpicomp.codecs.top_k import Selector


class TrueChoice:
    """The largest of the exact mean; see `Chooser`."""

    def __init__(self, memory: Memory) -> None:
        self._memory, parts, dtype = memory, memory.parts, memory.residual.dtype
        self._mean = np.empty(memory.residual.size, dtype)
        self._selectors = {(part.chunk, part.keep): Selector(part.chunk, part.keep, dtype) for part in parts}
        most = max((part.last - part.first for part in parts), default=0)
        self._indices, self._found = np.empty(most, np.uint32), np.empty(most, dtype)
        self.finite = True

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`."""
        traffic = call.traffic
        clock = traffic.clock
        start = clock()
        add(call.values, self._memory.residual, self._mean)
        self.finite = all_finite(self._mean)
        added = clock()
        yield from call.comm.dense_steps(call, self._mean, self._mean.dtype.name, True, self._mean, traffic)
        summed = clock()
        for part in self._memory.parts:
            count = part.last - part.first
            indices = self._indices[:count]
            select = self._selectors[part.chunk, part.keep]
            select(self._mean[part.elements], None, indices, self._found[:count])
            self._memory.place(part, indices)
        spent = clock() - summed + added - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent

    def end(self) -> None:
        """See `Chooser`: nothing of the caller's is kept."""
