"""Places that all ranks draw alike: one of each block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.memory import Memory
from mpicomp.kernels.streams import Stream, source


class DrawnPlaces:
    """One place of each block, drawn; see `Chooser`."""

    def __init__(self, memory: Memory, stream: Stream) -> None:
        self._memory, self._schedule = memory, stream.schedule()
        self._source = source(0)  # no rank's: all draw alike
        self.finite = True

    def choose(self, call: VectorCall) -> Iterator[bool]:
        """See `Chooser`; nothing is awaited."""
        traffic, memory = call.traffic, self._memory
        start = traffic.clock()
        at, self.finite = np.uint64(call.step & 0xFFFFFFFF), True
        for part in memory.parts:
            memory.draw_places(part, self._schedule, at, self._source)
            self.finite &= memory.is_finite(part, call.values)
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        yield from ()

    def end(self) -> None:
        """See `Chooser`: nothing of the caller's is kept."""
