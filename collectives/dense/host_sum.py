"""Sums and means in full precision, in memory of the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes, FloatArray, override
from collectives.arrays.elements import NARROW, Combine, add, narrow, widen
from collectives.execution.payload import MergedPayload, MessageMemory
from collectives.execution.program import Message, Program

TILE = 32768  # elements added, then divided, while in cache


def itemsize_in_messages(values: FloatArray, dtype: str) -> int:
    """Return the bytes of an element in messages whose sum is not complete."""
    return 4 if dtype in NARROW else values.itemsize


class DensePayload(MergedPayload):
    """Sum or mean of one vector per rank, added in the order of the plan.

    The first hop sends straight from `values`, and sums are written to `out`, where the result will be. 16-bit vectors
    are summed in float32 and travel as float32 until the sum is complete, then as 16 bits. `values` changes only if it
    is `out` or the float32 copy of a 16-bit vector. Each of the `buffers` has room for the longest piece; their number
    limits the messages under way.
    """

    brief = True

    def __init__(
        self,
        program: Program,
        values: FloatArray,
        dtype: str,
        mean: bool,
        buffers: Sequence[Bytes],
        out: FloatArray,
        combine: Combine = add,
    ) -> None:
        self.receive_buffers = len(buffers)
        self._pieces, self._size = program.pieces, program.plan.size
        self._dtype, self._mean, self._combine = dtype, mean, combine
        self._values, self._out = values, out
        self._widened = dtype in NARROW and values.dtype == np.float32
        self._narrow = self._widened or (dtype in NARROW and self._size > 1)
        self._sums: FloatArray = out
        if self._narrow:
            self._sums = values if self._widened else np.empty(values.size, np.float32)
        self._summed = [False] * len(self._pieces)  # the piece's state is in the sums, not in the input
        self._buffers = [
            buffer[: program.longest_piece * self._sums.itemsize].view(self._sums.dtype) for buffer in buffers
        ]

    @override
    def encode(self, piece: int) -> None:
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

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        # the result once it has the contributions of all ranks, before that the partial sum
        state = self._out if weight == self._size else self._sums if self._summed[piece] else self._values
        return self._bytes(state, self._pieces[piece])

    @override
    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        return self._bytes(self._buffers[buffer], range(len(self._pieces[piece])))

    @override
    def replacing(self, piece: int, weight: int) -> MessageMemory:
        return self._bytes(self._out, self._pieces[piece])

    @override
    def merge(self, message: Message, buffer: int) -> None:
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

    @staticmethod
    def _bytes(array: AnyArray, cut: range) -> MessageMemory:
        part = array[cut.start : cut.stop]
        return [part, part.nbytes, MPI.BYTE]
