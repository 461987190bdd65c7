"""Broadcasts of arrays: by MPI's own, or where all ranks may hand memory of GPUs to MPI, from GPU to GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives.arrays.torch_device import as_type
from collectives.arrays.vectors import Flat
from collectives.dense import variable_size
from collectives.dense.on_device import DIRECT_BYTES
from collectives.execution.handle import Call, Steps
from collectives.execution.pipelined import execute
from collectives.execution.program import Program
from collectives.execution.staged import awaited, deliver, fetch, late, takes_device_memory
from collectives.schedules.broadcast import Broadcast
from collectives.trace.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Callable

PIECE_BYTES = 1 << 20
MOST_PIECES = 256  # longer vectors have longer pieces


def way_of(nbytes: int, root: int) -> Broadcast:
    """The plan of a broadcast from GPU to GPU: a chain, with as many chunks as there are pieces."""
    return Broadcast(root, max(1, min(MOST_PIECES, nbytes // PIECE_BYTES)))


def is_long(vector: Flat) -> bool:
    """Whether ranks ask each other if all may hand memory of GPUs to MPI; the same on all ranks."""
    return vector.values.nbytes >= DIRECT_BYTES


class DeviceMemory:
    """What travels in a broadcast: the memory of a vector on a device. See `Payload`."""

    brief, receive_buffers = True, 0

    def __init__(self, program: Program, vector: Any) -> None:
        self._pieces, self._bytes = program.pieces, as_type(vector, "uint8")

    def encode(self, piece: int) -> None:
        """The root's vector is there."""

    def outgoing(self, piece: int, weight: int) -> Any:
        """See `Payload`."""
        cut = self._pieces[piece]
        return [MPI.buffer.fromaddress(self._bytes[cut.start :].data_ptr(), len(cut)), len(cut), MPI.BYTE]

    replacing = outgoing

    def finish(self, piece: int) -> None:
        """It is where it belongs."""


def broadcast(
    call: Call, vector: Flat, root: int, check: Callable[[Any], Steps], program: Callable[[], Program]
) -> Steps:
    """Steps of a broadcast.

    Parameters
    ----------
    call : Call
    vector : Flat
        Overwritten, but on the root.
    root : int
    check : callable
        Makes the steps in which the ranks agree on the call; a small array that it is given is summed on the way, and
        overwritten with the sum. It is given None, on all ranks, where nothing is to be summed.
    program : callable
        Makes this rank's program of `way_of`, in bytes.
    """
    there, payload = vector.staging, vector.values.view(np.uint8)
    is_root, size = call.group.mpi_comm.rank == root, call.group.mpi_comm.size
    if size > 1 and is_long(vector):
        direct = there is not None and (yield from late(call, takes_device_memory(call, there.device.name)))
        if there is not None and direct:
            yield from late(call, awaited(call, there.device.done, f"{there.device.name} does not come to the array"))
        elif there is not None and is_root:
            yield from fetch(call, there)
        ready = np.array([direct], np.int64)
        yield from check(ready)
        if there is not None and ready[0] == size:
            if call.completion is not None:
                there.device.use()
            made = program()
            yield from execute(call, made, DeviceMemory(made, there.vector), call.tag, Traffic())
            return
        if there is not None and direct and is_root:
            yield from fetch(call, there)
    else:
        if there is not None and is_root:
            yield from fetch(call, there)
        yield from check(None)
    yield from variable_size.broadcast(call, payload, root)
    if there is not None and not is_root:
        yield from deliver(call, there)
