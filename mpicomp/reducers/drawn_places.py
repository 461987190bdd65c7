"""Places that all ranks draw alike: one of each block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpicomp import kernels
from mpicomp.aggregator.call import VectorCall
from mpicomp.codecs.memory import Part
from mpicomp.kernels.streams import Stream, source


class DrawnPlaces:
    """One place of each block, drawn; see `Chooser`."""

    def __init__(self, parts: Sequence[Part], stream: Stream) -> None:
        self._parts, self._schedule = parts, stream.schedule()
        self._source = source(0)  # no rank's: all draw alike
        self._kernels = kernels.of("cpu").sparse
        self.finite = True

    def choose(self, call: VectorCall, residual: NDArray[Any], places: NDArray[np.int64]) -> Iterator[bool]:
        """See `Chooser`; nothing is awaited."""
        traffic, values = call.traffic, call.values
        start = traffic.clock()
        at, self.finite = np.uint64(call.step & 0xFFFFFFFF), True
        for part in self._parts:
            limits = part.chunk, part.start, part.stop
            self._kernels.draw_strata(self._schedule, part.first, at, self._source, *limits, places[part.values])
            self.finite &= bool(self._kernels.finite_sum(values[part.elements], residual[part.elements]))
        spent = traffic.clock() - start
        traffic.seconds_encoding += spent
        traffic.seconds_total += spent
        yield from ()

    def end(self) -> None:
        """See `Chooser`: nothing of the caller's is kept."""
