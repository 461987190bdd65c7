"""Marsit's kernels in the host's memory, run by run of elements that share a scale; `SignBlocks` is for devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from collectives.annotations import Array, Doubles, FloatArray, Indices
from mpicomp import kernels
from mpicomp.feedback.in_place_residual import InPlaceResidual
from mpicomp.feedback.scale_groups import Run, ScaleGroups
from mpicomp.feedback.step_size import StepSize

STREAMING_ELEMENTS = 4 << 20  # results this long are written past the caches
Parts = list[list[Array | None]]
"""Part of a buffer for each run of each piece."""
Tensors = Sequence[tuple[FloatArray, FloatArray]]
"""Pairs of vectors: before and after a local update."""


class SignRun(NamedTuple):
    """A run of elements that share a scale, and where its bits and sums are; `within` its tensor."""

    elements: slice
    within: slice
    tensor: int
    bits: Array
    second: Array | None
    sums: Array


class HostSigns:
    """Packed signs of one vector, and the reports of encoding them. Several threads may work on different pieces.

    Parameters
    ----------
    groups : ScaleGroups
        Tensors of the vector, padding included.
    pieces : sequence of range
    lengths : int64[tensors]
        Elements of each tensor.
    bits, second : uint64 arrays
        The reducer's signs, and second votes or None.
    size : StepSize
    residual : InPlaceResidual or None
    sums : bool
        False: one-bit steps report 0 in place of sums, or NaN where a value is not finite.
    """

    def __init__(
        self,
        groups: ScaleGroups,
        pieces: Sequence[range],
        lengths: Indices,
        bits: Array,
        second: Array | None,
        size: StepSize,
        residual: InPlaceResidual | None,
        sums: bool,
    ) -> None:
        self._size, self._has_sums, self.pieces, of_cpu = size, sums, pieces, kernels.of("cpu")
        self._sign, self._unpack_pair = of_cpu.sign, of_cpu.shared_selection.unpack_pair
        self._pending = residual.pending if residual is not None and residual.lazy else None
        kind = size.steps.dtype.type
        self._constants, self._streaming = (kind(0), np.nextafter(kind(0), kind(1))), False
        self._sums = np.zeros(groups.blocks)  # of |u|, block by block
        self._clipped = [0] * len(pieces)  # elements of each piece; the sum of a list takes a tenth of an array's time

        def run(found: Run) -> SignRun:
            own = bits[found.words()], None if second is None else second[found.words()]
            first, length = int(groups.starts[found.group]), int(lengths[found.group])
            within = slice(found.elements.start - first, min(found.elements.stop - first, length))
            return SignRun(found.elements, within, found.group, *own, self._sums[found.sums])

        self._runs = [[run(one) for one in runs] for runs in groups.runs(pieces)]
        self._residual, self._parts_by_place = residual, dict[int, Parts]()
        self._set_buffers()

    def begin(self, out: Array) -> None:
        """Start another step, whose result is written to `out`."""
        self._set_buffers()
        self._clipped = [0] * len(self._runs)
        self._streaming = len(out) >= STREAMING_ELEMENTS and out.ctypes.data % 32 == 0

    def send_scales(self) -> None:
        """Do nothing: kernels of the host read the scales where they are."""

    def encode(self, piece: int, vector: Array, odd_positive: bool, tensors: Tensors | None, *, first: int = 0) -> None:
        """Encode a piece, and write its residual.

        The values are those of a vector that begins with element `first`, or of the pairs of `tensors`.
        """
        (zero, tiny), encode, size, whole = self._constants, self._sign.encode, self._size, None
        for run, residual, left in zip(self._runs[piece], self._old[piece], self._new[piece], strict=True):
            tensor = run.tensor
            if tensors is None:
                u = vector[run.elements.start - first : run.elements.stop - first]
            else:
                before, after = tensors[tensor]
                whole, u = before[run.within], after[run.within]
            if not self._has_sums:
                run.sums[:] = 0.0 if self._sign.pack(u, run.bits, odd_positive, zero, tiny) else np.nan
                continue
            previous = None if self._pending is None else self._pending[tensor]
            terms = u, whole, residual, left, run.bits, size.steps[tensor], size.limits[tensor], previous
            self._clipped[piece] += encode(*terms, odd_positive, zero, tiny, run.sums)

    def decode(self, piece: int, out: Array) -> None:
        """Write the result of a piece to `out`, unsigned integers[n], from its merged signs."""
        positive, negative = self._size.positive, self._size.negative
        for run in self._runs[piece]:
            plus, minus, part = positive[run.tensor], negative[run.tensor], out[run.elements]
            if run.second is None:
                self._sign.unpack(run.bits, plus, minus, self._streaming, part)
            else:
                nothing = positive.dtype.type(0)
                self._unpack_pair(run.bits, run.second, plus, nothing, minus, self._streaming, part)

    def add_and_clear(self, vector: Array, total: Array) -> None:
        """Overwrite `total` with vector + residual, clear the residual, and sum the magnitudes of the vector."""
        buffers = chain.from_iterable(self._old), chain.from_iterable(self._new)
        for run, residual, left in zip(self._every_run(), *buffers, strict=True):
            previous = None if self._pending is None else self._pending[run.tensor]
            terms = vector[run.elements], residual, left, run.bits, previous, total[run.elements], run.sums
            self._sign.add_and_clear(*terms)

    def measure(self, vector: Array) -> None:
        """Sum the magnitudes of a vector."""
        for run in self._every_run():
            self._sign.add_and_clear(vector[run.elements], None, None, run.bits, None, None, run.sums)

    def subtract_pending(self, residual: Array) -> None:
        """Subtract the results that are pending from a residual."""
        assert self._pending is not None
        for run in self._every_run():
            self._sign.subtract_result(residual[run.elements], run.bits, self._pending[run.tensor])

    def subtract_from(self, tensors: Sequence[FloatArray]) -> None:
        """Subtract the last result, which was left packed, from flat tensors."""
        for run in self._every_run():
            self._sign.subtract_result(tensors[run.tensor][run.within], run.bits, self._size.steps[run.tensor])

    def reports(self) -> tuple[Doubles, int]:
        """Return each block's sum of magnitudes, and the number of clipped elements, of the last pass."""
        return self._sums, sum(self._clipped)

    def _set_buffers(self) -> None:
        """Find the buffers from which this step reads the residual, and to which it writes the new one."""
        residual = self._residual
        self._old = self._parts(None if residual is None else residual.current)
        self._new = self._parts(None if residual is None else residual.following)

    def _parts(self, buffer: Array | None) -> Parts:
        """Return the part of each run; parts of a buffer are made once, since a slice takes as long as a short run."""
        if id(buffer) not in self._parts_by_place:
            self._parts_by_place[id(buffer)] = [
                [None if buffer is None else buffer[run.elements] for run in runs] for runs in self._runs
            ]
        return self._parts_by_place[id(buffer)]

    def _every_run(self) -> Iterator[SignRun]:
        return chain.from_iterable(self._runs)
