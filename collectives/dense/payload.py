"""Sums and means in full precision: the numbers themselves travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.arrays.elements import SIXTEEN_BIT, Combine, add, narrow, widen
from collectives.execution.program import Message, Program

TILE = 32768  # elements added, then divided, while in cache


def itemsize_in_messages(values: NDArray[Any], dtype: str) -> int:
    """Bytes that an element takes in a message whose sum is not complete."""
    return 4 if dtype in SIXTEEN_BIT else values.itemsize


class DensePayload:
    """Sum or mean of one vector per rank; the order of additions is the plan's.

    The first hop sends straight from the input, and a sum is written where the result will be. 16-bit vectors are
    summed in float32 and travel as float32 until the sum is complete, then as 16 bits.

    `values`, ndarray[n], is left alone unless it is `out` or a float32 copy of a 16-bit vector. `dtype` names its
    element type, as bfloat16 is uint16 to NumPy. `buffers`, uint8[bytes of the longest piece, or more], are for as many
    messages to be merged as may be under way at once. `out`, ndarray[n], is overwritten with the result.
    `combine` takes the place of the sum.
    """

    brief = True

    def __init__(
        self,
        program: Program,
        values: NDArray[Any],
        dtype: str,
        mean: bool,
        buffers: Sequence[NDArray[np.uint8]],
        out: NDArray[Any],
        combine: Combine = add,
    ) -> None:
        self.receive_buffers = len(buffers)
        self._pieces, self._size = program.pieces, program.plan.size
        self._dtype, self._mean, self._combine = dtype, mean, combine
        self._values, self._out = values, out
        self._widened = dtype in SIXTEEN_BIT and values.dtype == np.float32
        self._narrow = self._widened or (dtype in SIXTEEN_BIT and self._size > 1)
        self._sums: NDArray[Any] = out
        if self._narrow:
            self._sums = values if self._widened else np.empty(values.size, np.float32)
        self._summed = [False] * len(self._pieces)  # whether a piece's state is in the sums (else in the input)
        self._buffers = [
            buffer[: program.longest_piece * self._sums.itemsize].view(self._sums.dtype) for buffer in buffers
        ]

    def encode(self, piece: int) -> None:
        """Widen 16-bit elements; everything else is sent from where it is."""
        cut = self._pieces[piece]
        part = slice(cut.start, cut.stop)
        if self._narrow:
            if not self._widened:
                widen(self._values[part], self._dtype, self._sums[part])
            self._summed[piece] = True
        if self._size == 1:
            if self._narrow:
                narrow(self._sums[part], self._dtype, self._out[part])
            else:
                self._out[part] = self._values[part]

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: the result once it speaks for all ranks, else the sum so far."""
        state = self._out if weight == self._size else self._sums if self._summed[piece] else self._values
        return self._bytes(state, self._pieces[piece])

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        return self._bytes(self._buffers[buffer], range(len(self._pieces[piece])))

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._bytes(self._out, self._pieces[piece])

    def prepare(self, message: Message, buffer: int) -> None:
        """Nothing can be done ahead of a sum."""

    def merge(self, message: Message, buffer: int) -> None:
        """Add; if that completes the sum, divide and round it as well."""
        cut = self._pieces[message.piece]
        held = self._sums if self._summed[message.piece] else self._values
        incoming = self._buffers[buffer]
        complete = message.weight + message.held_weight == self._size
        self._summed[message.piece] = True
        for start in range(cut.start, cut.stop, TILE):
            tile = slice(start, min(start + TILE, cut.stop))
            sums = self._sums[tile]
            self._combine(held[tile], incoming[tile.start - cut.start : tile.stop - cut.start], sums)
            if complete and self._mean:
                np.divide(sums, self._size, out=sums)
            if complete and self._narrow:
                narrow(sums, self._dtype, self._out[tile])

    def finish(self, piece: int) -> None:
        """The result is already in place."""

    @staticmethod
    def _bytes(array: NDArray[Any], cut: range) -> Any:
        part = array[cut.start : cut.stop]
        return [part, part.nbytes, MPI.BYTE]
