"""Dense sums of arrays on devices: some are added on the device, others go through the host.

Each rank decides for itself where it adds, since the messages are the same bytes in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes, Tensor, Testable, override
from collectives.arrays import Device
from collectives.arrays.elements import NARROW
from collectives.arrays.torch_device import as_type, combine, divide
from collectives.arrays.vectors import Flat
from collectives.execution.call import Call, Steps
from collectives.execution.payload import MergedPayload, MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from collectives.execution.staged import await_array, await_operation, takes_device_memory, use_in_background
from collectives.execution.traffic import Traffic

# Vectors below this, in bytes of their messages, go through the host as a whole: one copy each way, where the way by
# pieces has up to three, and kernels for each. From this length on "auto" takes the ring; not measured on a GPU.
STAGED_BYTES = 4 << 20
# The same limit if MPI reads the device's memory, which needs no copies; not measured on a GPU either.
DIRECT_BYTES = 64 << 10
RECEIVE_BUFFERS = 4  # one message is copied while another is added and others travel

_NO_BYTES: Bytes = np.empty(0, np.uint8)


class DevicePayload(MergedPayload):
    """Sum, mean, minimum or maximum of one vector per rank, of which this rank's is on a device.

    The messages are those of `collectives.dense.host_sum.DensePayload`, byte for byte, and operands are combined in the
    same order, so that ranks with either payload can sum together. Two things depend on the processor: which of
    several NaNs is the result, and the sign of a minimum or maximum of +0 and -0.

    There are two ranks or more, and the program may begin once the device has done all earlier work. With `direct` MPI
    reads and writes the device's memory; otherwise messages go through pinned memory, piece by piece. That is `host`
    if it is as long as the vector in messages; otherwise it is allocated.

    Raises
    ------
    RuntimeError
        There is not enough memory, on the device or pinned.
    """

    brief = True
    receive_buffers = RECEIVE_BUFFERS

    def __init__(
        self,
        program: Program,
        device: Device,
        values: Tensor,
        dtype: str,
        op: str,
        out: Tensor,
        direct: bool,
        host: Bytes = _NO_BYTES,
    ) -> None:
        self._device, self._direct, self._op = device, direct, op
        self._pieces, self._chains, self._size = program.pieces, program.chains, program.plan.size
        self._last_recv = program.last_recv
        self._narrow, self._mean = dtype in NARROW, op == "mean"
        travels = "float32" if self._narrow else dtype  # until the sum is complete
        self._is_wide = self._narrow and values.element_size() != out.element_size()
        self._values, self._out = as_type(values, travels if self._is_wide else dtype), as_type(out, dtype)
        if self._is_wide:
            self._sums = self._values
        else:
            self._sums = device.zeros(values.numel(), travels) if self._narrow else self._out
        self._summed = [self._narrow] * len(self._pieces)  # the piece's state is in the sums, not in the input
        self._ranks = device.zeros(1, travels)
        if self._mean:
            device.run(partial(self._ranks.fill_, self._size))
        longest = program.longest_piece
        self._landing = [device.zeros(longest, travels) for _ in range(RECEIVE_BUFFERS)]
        self._itemsize = self._sums.element_size()
        self._host, self._pinned = _NO_BYTES, np.empty((0, 0), np.uint8)
        if not direct:
            nbytes = values.numel() * self._itemsize
            self._host = device.pinned(nbytes) if host.nbytes != nbytes else host
            self._pinned = device.pinned(RECEIVE_BUFFERS * longest * self._itemsize).reshape(RECEIVE_BUFFERS, -1)
        self._sent_on = {  # receives after whose merge the piece is sent
            message.index for chain in self._chains for message, after in pairwise(chain)
            if not message.is_send and after.is_send
        }  # fmt: skip

    @override
    def encode(self, piece: int) -> Testable | None:
        part = self._part(piece)
        if self._narrow and not self._is_wide:
            self._device.run(partial(self._sums[part].copy_, self._values[part]))
        if self._chains[piece][0].is_send:
            return self._ready(piece, self._state(piece))
        return None  # merges into the piece run on the device after this

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        # the result once it has the contributions of all ranks, before that the partial sum
        return self._message(piece, self._out[self._part(piece)] if weight == self._size else self._state(piece))

    @override
    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        nbytes = len(self._pieces[piece]) * self._itemsize
        if self._direct:
            return [self._address(self._landing[buffer], nbytes), nbytes, MPI.BYTE]
        return [self._pinned[buffer, :nbytes], nbytes, MPI.BYTE]

    @override
    def replacing(self, piece: int, weight: int) -> MessageMemory:
        return self._message(piece, self._out[self._part(piece)])

    @override
    def merge(self, message: Message, buffer: int) -> Testable | None:
        piece = message.piece
        complete = message.weight + message.held_weight == self._size
        landing = self._landing[buffer][: len(self._pieces[piece])]
        if not self._direct:
            self._device.copy(self._pinned[buffer, : len(landing) * self._itemsize], self._bytes(landing))
        self._device.run(partial(self._add, self._part(piece), self._state(piece), landing, complete))
        self._summed[piece] = True
        state = self._out[self._part(piece)] if complete else self._state(piece)
        return self._ready(piece, state) if message.index in self._sent_on else self._device.done()

    @override
    def finish(self, piece: int) -> Testable | None:
        # a result that another rank has completed has to be copied to the device
        if self._direct or self._chains[piece][self._last_recv[piece]].held_weight:
            return None
        there = self._out[self._part(piece)]
        return self._device.copy(self._through(piece, there), self._bytes(there))

    def _add(self, part: slice, held: Tensor, incoming: Tensor, complete: bool) -> None:
        sums = self._sums[part]
        combine(self._op, held, incoming, sums)
        if complete and self._mean:
            divide(sums, self._ranks)
        if complete and self._narrow:
            self._out[part].copy_(sums)

    def _ready(self, piece: int, there: Tensor) -> Testable | None:
        """Return a handle that completes once MPI can read a piece that kernels write, or None if it can now."""
        if self._direct:
            return self._device.done()
        return self._device.copy(self._bytes(there), self._through(piece, there))

    def _message(self, piece: int, there: Tensor) -> MessageMemory:
        nbytes = there.nbytes
        return [self._address(there, nbytes) if self._direct else self._through(piece, there), nbytes, MPI.BYTE]

    def _through(self, piece: int, there: Tensor) -> Bytes:
        """Return the memory of the host that a piece travels through."""
        start = self._pieces[piece].start * self._itemsize
        return self._host[start : start + there.nbytes]

    def _part(self, piece: int) -> slice:
        cut = self._pieces[piece]
        return slice(cut.start, cut.stop)

    def _state(self, piece: int) -> Tensor:
        return (self._sums if self._summed[piece] else self._values)[self._part(piece)]

    @staticmethod
    def _bytes(there: Tensor) -> Tensor:
        return as_type(there, "uint8")

    @staticmethod
    def _address(there: Tensor, nbytes: int) -> MPI.buffer:
        return MPI.buffer.fromaddress(there.data_ptr(), nbytes)


def are_on_one_device(source: Flat, target: Flat) -> bool:
    """Return whether an array and its result are on the same device."""
    here, there = source.staging, target.staging
    return here is not None and there is not None and here.device is there.device


def settled_before(call: Call, source: Flat, ranks: int) -> Steps:
    """Wait for an array on a device, and probe MPI with such memory if the sum may use it.

    Both come before the ranks compare the call, so that other ranks wait with the timeout for ranks that compute.
    """
    assert source.staging is not None
    device = source.staging.device
    yield from await_array(call, device)
    if ranks > 1 and source.values.nbytes >= DIRECT_BYTES:
        yield from takes_device_memory(call, device.name)


def copy_on_device(call: Call, source: Flat, target: Flat, check: Steps) -> Steps:
    """Copy an array to its result on the device: the sum of a single rank."""
    here, there = source.staging, target.staging
    assert here is not None
    assert there is not None
    yield from check
    here.device.run(partial(there.vector.copy_, here.vector))
    yield from await_operation(call, here.device.done, f"{here.device.name} does not come to the array")


def sum_on_device(
    call: Call,
    program: Program,
    nbytes: int,
    source: Flat,
    target: Flat,
    op: str,
    traffic: Traffic,
    check: Steps,
    through_host: Callable[[], Steps],
    overlapped: bool,
) -> Steps:
    """Overwrite `target` with a sum made on a device, by the same program as the other ranks, of two ranks or more.

    The vector has `nbytes` in messages, and `check` compares the call among the ranks. `through_host` returns the steps
    of a sum in memory of the host, its check included: for short vectors, and if the device lacks memory.
    """
    here, there = source.staging, target.staging
    assert here is not None
    assert there is not None
    device = here.device
    use_in_background(call, device)  # before memory is allocated there
    payload = None
    direct = nbytes >= DIRECT_BYTES and (yield from takes_device_memory(call, device.name))
    if direct or nbytes >= STAGED_BYTES:
        with suppress(RuntimeError):  # PyTorch raises it if memory is missing
            payload = DevicePayload(
                program, device, here.vector, source.dtype, op, there.vector, direct, host=here.host
            )
    if payload is None:
        yield from through_host()
        return
    # MPI is called with memory of the device, and other calls may have made another device current meanwhile.
    use_in_background(call, device)
    # Wait for the stream that produces the input and for pending uses of the output buffer.
    yield from await_array(call, device)
    yield from check
    yield from execute(call, program, payload, call.tag, traffic, overlapped=overlapped)
