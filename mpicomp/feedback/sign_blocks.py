"""Marsit's kernels on a device: one launch for a piece, and one copy each way, whatever the number of its tensors.

Tables of blocks and scales are on the device, where each program of a launch looks up its tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from collectives.annotations import AnyArray, Array, Doubles, Testable
from mpicomp.feedback.in_place_residual import InPlaceResidual
from mpicomp.feedback.scale_groups import ScaleGroups
from mpicomp.feedback.step_size import StepSize
from mpicomp.kernels import of
from mpicomp.kernels.streams import BLOCK
from mpicomp.spaces import DeviceSpace, Space
from mpicomp.spaces.mirror import DevicePacked

Buffers = tuple[Array | None, Array | None]
N_SCALES, N_OF_ENCODING = 6, 4  # numbers of a tensor, as in `mpicomp.kernels.gpu.sign_blocks`; decoding has the rest


class BlockTable:
    """Blocks of scale groups, cut along the pieces that travel: a row for each program of a launch on a device.

    Parameters
    ----------
    groups : ScaleGroups
        Each begins at a multiple of 64.
    pieces : sequence of range

    Attributes
    ----------
    extents : list of slice
        Rows of each piece; sums of blocks have the same places.
    n_blocks : int
        Rows of all pieces.
    all, of_pieces : BlockRows, list of BlockRows
        Rows of all pieces, see `mpicomp.kernels.gpu.sign_blocks`, and those of each; set by `send`.
    """

    all: Any
    of_pieces: list[Any]

    def __init__(self, groups: ScaleGroups, pieces: Sequence[range]) -> None:
        self._pieces, self._rows = pieces, [_rows(groups, cut) for cut in pieces]
        stops = np.cumsum([0, *map(len, self._rows)]).tolist()
        self.extents, self.n_blocks = [slice(start, stop) for start, stop in pairwise(stops)], stops[-1]

    def send(self, space: Space, starts: Sequence[int] | None) -> None:
        """Copy the table to a device.

        starts : place of each piece's first word among all packed words; None: words follow each other.
        """
        if starts is not None:
            for rows, cut, start in zip(self._rows, self._pieces, starts, strict=True):
                rows[:, 3] += start - cut.start // 64
        table = np.concatenate([np.zeros((0, 4), np.int64), *self._rows])
        # kept as a mirror: its memory of the host must live until it is copied
        self._mirror = space.sent(table.reshape(-1))
        rows_of = of("cuda").sign_blocks.BlockRows
        self.all = rows_of(self._mirror.there, 0, len(table), not (table[:, 1] % 64).any())
        sizes = [(extent.start, extent.stop - extent.start) for extent in self.extents]
        self.of_pieces = [self.all._replace(first=first, n_blocks=n_blocks) for first, n_blocks in sizes]


def _rows(groups: ScaleGroups, cut: range) -> AnyArray:
    """Return first element, stop, group and word of each block of a piece; words count from element 0."""
    rows = [np.zeros((0, 4), np.int64)]
    for run in groups.runs([cut])[0]:
        begins = np.arange(run.elements.start, run.elements.stop, BLOCK)
        stops = np.minimum(begins + BLOCK, run.elements.stop)
        rows.append(np.stack([begins, stops, np.full_like(begins, run.group), begins // 64], axis=1))
    return np.concatenate(rows)


class SignBlocks:
    """Tables, reports and packed signs of one vector on a device.

    A block's report has the sum of its magnitudes and the number of clipped elements.

    Parameters
    ----------
    device : Device
    groups : ScaleGroups
        Tensors of the vector, padding included.
    pieces : sequence of range
    bits : uint64 array, or int64 tensor
        The reducer's signs, in the host's memory or on the device.
    second : int64 tensor, optional
        Second votes.
    size : StepSize
    residual : InPlaceResidual or None
    sums : bool
        False: one-bit steps report 0 in place of sums, or NaN where a value is not finite.

    Attributes
    ----------
    looks_ahead : bool
        There is one piece, whose signs cross: the scales of the next step cross with them.
    """

    def __init__(
        self,
        space: DeviceSpace,
        groups: ScaleGroups,
        pieces: Sequence[range],
        bits: Array,
        second: Array | None,
        size: StepSize,
        residual: InPlaceResidual | None,
        sums: bool,
    ) -> None:
        self._device, self._sign, self._second = space.device, of("cuda").sign_blocks, second
        self._size, self._residual = size, residual
        self._is_lazy = residual is not None and residual.lazy
        self._pending = np.zeros_like(size.steps) if residual is None else residual.pending
        self._blocks = blocks = BlockTable(groups, pieces)
        self._reports = space.mirror(space.zeros(2 * blocks.n_blocks, "int64"))  # of all blocks
        self._extents = [slice(2 * extent.start, 2 * extent.stop) for extent in blocks.extents]
        self._packed: DevicePacked | None = None  # None: signs need not cross
        self.looks_ahead = False
        self._bits = bits
        if isinstance(bits, np.ndarray):
            words = [bits[cut.start // 64 : -(-cut.stop // 64)] for cut in pieces]
            self.looks_ahead = len(pieces) == 1 and second is None
            tail = N_SCALES * groups.starts.size if self.looks_ahead else 0
            self._packed = DevicePacked(space.device, words, [part.stop - part.start for part in self._extents], tail)
            self._bits = self._packed.whole
        blocks.send(space, None if self._packed is None else self._packed.starts)
        # a step sends its own scales while the ones for pending results may still be on their way
        own, self._scales_of_pending = (
            space.mirror(space.zeros(N_SCALES * groups.starts.size, "int64")) for _ in range(2)
        )
        self._scales, here = own.there, own.here
        self._deliver_scales: Callable[[], object] = own.deliver
        if self._packed is not None and self.looks_ahead:
            self._scales, here = self._packed.tail, self._packed.tail_here
            self._deliver_scales = self._packed.deliver_tail
        self._rows = here.reshape(-1, N_SCALES)
        self._ahead: bytes | None = None  # columns for encoding that have crossed ahead of their step
        self._least = -size.limits
        columns = size.steps, size.limits, self._least, self._pending, size.positive, size.negative
        self._columns = [values.view(f"i{values.itemsize}") for values in columns]  # of the scales, as they change
        self._seen = list[AnyArray]()  # reports of the last pass over the vector, in the host's memory
        self._gain, self._gain_of_signs = 1.0, float(sums)

    def begin(self, out: Array) -> None:
        """Start another step."""

    def send_scales(self) -> None:
        """Copy the scales of a step to the device, unless they have crossed with the last step's signs.

        Earlier copies must have ended, or have had the same numbers.
        """
        self._write(self._rows, N_SCALES)
        if self._rows[:, :N_OF_ENCODING].tobytes() != self._ahead:
            self._deliver_scales()
        self._ahead = None

    def look_ahead(self, fix: Callable[[], bool]) -> None:
        """Let the scales of the next step, which `fix` makes unless they overflow, cross with the signs of this one."""
        if fix():
            self._write(self._rows, N_OF_ENCODING)  # those of decoding are this step's
            self._ahead = self._rows[:, :N_OF_ENCODING].tobytes()

    def _write(self, rows: AnyArray, n_columns: int) -> None:
        np.negative(self._size.limits, out=self._least)
        for column, words in zip(rows.T, self._columns[:n_columns], strict=False):
            column[:] = words

    def encode(self, piece: int, vector: Array, odd_positive: bool, tensors: object = None) -> Testable | None:
        """Encode a piece; returns a handle of its signs and reports on the host."""
        reports = self._packed.heads[piece] if self._packed is not None else self._reports.there[self._extents[piece]]
        rows = self._blocks.of_pieces[piece]
        terms = vector, *self._buffers(), self._bits, rows, self._scales, self._is_lazy, odd_positive, reports
        self._device.run(partial(self._sign.encode_blocks, *terms))
        self._seen = self._packed.heads_here if self._packed is not None else [self._reports.here]
        self._gain = self._gain_of_signs
        return self._reports.fetch(self._extents[piece]) if self._packed is None else self._packed.fetch(piece)

    def decode(self, piece: int, out: Array) -> Testable | None:
        """Write the result of a piece to `out`, integers[n], from its merged signs."""
        if self._packed is not None:
            self._packed.deliver(piece)
        terms = self._bits, self._second, self._blocks.of_pieces[piece], self._scales, out
        self._device.run(partial(self._sign.unpack_blocks, *terms))
        return self._device.done()

    def add_and_clear(self, vector: Array, total: Array) -> Testable | None:
        """Overwrite `total` with vector + residual, and clear the residual; returns a handle of the reports."""
        if self._is_lazy:
            self.send_scales()
        return self._sum_up(vector, self._buffers(), self._is_lazy, total)

    def measure(self, vector: Array) -> Testable | None:
        """Sum the magnitudes of a vector; returns a handle of the reports."""
        return self._sum_up(vector, (None, None), False, None)

    def _buffers(self) -> Buffers:
        """Return the residual, and the place of the new one."""
        return (None, None) if self._residual is None else (self._residual.current, self._residual.following)

    def _sum_up(self, vector: Array, buffers: Buffers, lazy: bool, total: Array | None) -> Testable | None:
        terms = vector, *buffers, self._bits, self._blocks.all, self._scales, lazy, total, self._reports.there
        self._device.run(partial(self._sign.add_and_clear_blocks, *terms))
        self._seen, self._gain = [self._reports.here], 1.0
        return self._reports.fetch()

    def subtract_pending(self, residual: Array) -> None:
        """Subtract the results that are pending from a residual."""
        self._write(self._scales_of_pending.here.reshape(-1, N_SCALES), N_SCALES)
        self._scales_of_pending.deliver()
        terms = residual, self._bits, self._blocks.all, self._scales_of_pending.there
        self._device.run(partial(self._sign.subtract_blocks, *terms))

    def reports(self) -> tuple[Doubles, int]:
        """Return each block's sum of magnitudes, and the number of clipped elements, of the last pass."""
        seen = self._seen[0] if len(self._seen) == 1 else np.concatenate([self._reports.here[:0], *self._seen])
        reports = seen.reshape(-1, 2)
        return reports[:, 0].view(np.float64) * self._gain, int(reports[:, 1].sum())
