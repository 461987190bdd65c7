"""Sums and means in full precision of vectors on a device: added there, whatever way the messages go."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.annotations import Testable
from collectives.arrays import Device
from collectives.arrays.elements import SIXTEEN_BIT
from collectives.arrays.torch_device import as_type, combine, divide
from collectives.execution.program import Message, Program

RECEIVE_BUFFERS = 4  # one message is copied while another is added and others travel


class DevicePayload:
    """Sum, mean, minimum or maximum of one vector per rank, of which this rank's is on a device.

    The messages are those of `collectives.dense.payload.DensePayload`, byte for byte, and operands are combined in the
    same order, so that some ranks may have this payload and others that one. Only which of several NaNs comes out,
    and the sign of a minimum or maximum of +0 and -0, is the processor's choice.

    Parameters
    ----------
    program : Program
        Of two ranks or more.
    device : Device
    values : tensor[n]
        Left alone unless it is `out`.
    dtype : str
        Element type.
    op : str
        One of `collectives.arrays.elements.COMBINE`.
    out : tensor[n]
        Overwritten with the result. The program may begin once the device has done what it was given before.
    direct : bool
        MPI reads and writes the device's memory; else messages go through pinned memory, piece by piece.

    Raises
    ------
    RuntimeError
        There is not enough memory, on the device or pinned.
    """

    brief = True
    receive_buffers = RECEIVE_BUFFERS

    def __init__(
        self, program: Program, device: Device, values: Any, dtype: str, op: str, out: Any, direct: bool
    ) -> None:
        self._device, self._direct, self._op = device, direct, op
        self._pieces, self._chains, self._size = program.pieces, program.chains, program.plan.size
        self._last_recv = program.last_recv
        self._values, self._out = as_type(values, dtype), as_type(out, dtype)
        self._narrow, self._mean = dtype in SIXTEEN_BIT, op == "mean"
        travels = "float32" if self._narrow else dtype  # until the sum is complete
        self._sums = device.zeros(values.numel(), travels) if self._narrow else self._out
        self._summed = [self._narrow] * len(self._pieces)  # whether a piece's state is in the sums, else in the input
        self._ranks = device.zeros(1, travels)
        if self._mean:
            device.run(partial(self._ranks.fill_, self._size))
        longest = program.longest_piece
        self._landing = [device.zeros(longest, travels) for _ in range(RECEIVE_BUFFERS)]
        self._itemsize = self._sums.element_size()
        self._host, self._pinned = np.empty(0, np.uint8), np.empty((0, 0), np.uint8)
        if not direct:
            self._host = device.pinned(values.numel() * self._itemsize)
            self._pinned = device.pinned(RECEIVE_BUFFERS * longest * self._itemsize).reshape(RECEIVE_BUFFERS, -1)
        self._sent_on = {  # receives after whose merge the piece is sent
            message.index for chain in self._chains for message, after in pairwise(chain)
            if not message.is_send and after.is_send
        }  # fmt: skip

    def encode(self, piece: int) -> Testable | None:
        """Widen 16-bit elements, and have what is sent first ready to be sent."""
        part = self._part(piece)
        if self._narrow:
            self._device.run(partial(self._sums[part].copy_, self._values[part]))
        if self._chains[piece][0].is_send:
            return self._ready(piece, self._state(piece))
        return None  # what is merged into it follows on the device

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`: the result once it speaks for all ranks, else the sum so far."""
        return self._message(piece, self._out[self._part(piece)] if weight == self._size else self._state(piece))

    def incoming(self, piece: int, buffer: int, weight: int) -> Any:
        """See `Payload`."""
        nbytes = len(self._pieces[piece]) * self._itemsize
        if self._direct:
            return [self._address(self._landing[buffer], nbytes), nbytes, MPI.BYTE]
        return [self._pinned[buffer, :nbytes], nbytes, MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        return self._message(piece, self._out[self._part(piece)])

    def prepare(self, message: Message, buffer: int) -> None:
        """Nothing can be done ahead of a sum."""

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Add; if that completes the sum, divide and round it as well, and have it ready if it is to be sent."""
        piece = message.piece
        complete = message.weight + message.held_weight == self._size
        landing = self._landing[buffer][: len(self._pieces[piece])]
        if not self._direct:
            self._device.copy(self._pinned[buffer, : len(landing) * self._itemsize], self._bytes(landing))
        self._device.run(partial(self._add, self._part(piece), self._state(piece), landing, complete))
        self._summed[piece] = True
        state = self._out[self._part(piece)] if complete else self._state(piece)
        return self._ready(piece, state) if message.index in self._sent_on else self._device.done()

    def finish(self, piece: int) -> Testable | None:
        """Copy a result that another rank has completed to the device."""
        if self._direct or self._chains[piece][self._last_recv[piece]].held_weight:
            return None
        there = self._out[self._part(piece)]
        return self._device.copy(self._through(piece, there), self._bytes(there))

    def _add(self, part: slice, held: Any, incoming: Any, complete: bool) -> None:
        sums = self._sums[part]
        combine(self._op, held, incoming, sums)
        if complete and self._mean:
            divide(sums, self._ranks)
        if complete and self._narrow:
            self._out[part].copy_(sums)

    def _ready(self, piece: int, there: Any) -> Testable | None:
        """Tells when MPI can read a piece, which kernels have yet to write."""
        if self._direct:
            return self._device.done()
        return self._device.copy(self._bytes(there), self._through(piece, there))

    def _message(self, piece: int, there: Any) -> Any:
        nbytes = there.nbytes
        return [self._address(there, nbytes) if self._direct else self._through(piece, there), nbytes, MPI.BYTE]

    def _through(self, piece: int, there: Any) -> Any:
        """The host's memory that a piece travels through."""
        start = self._pieces[piece].start * self._itemsize
        return self._host[start : start + there.nbytes]

    def _part(self, piece: int) -> slice:
        cut = self._pieces[piece]
        return slice(cut.start, cut.stop)

    def _state(self, piece: int) -> Any:
        return (self._sums if self._summed[piece] else self._values)[self._part(piece)]

    @staticmethod
    def _bytes(there: Any) -> Any:
        return as_type(there, "uint8")

    @staticmethod
    def _address(there: Any, nbytes: int) -> Any:
        return MPI.buffer.fromaddress(there.data_ptr(), nbytes)
