"""Broadcasts and gathered rows: arrays and payloads that move and are not summed.

MPI's own collectives move them part by part. If all ranks can pass memory of GPUs to MPI, a broadcast goes from GPU to
GPU along a chain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import numpy as np
from mpi4py import MPI

from collectives.annotations import Array, Bytes, Indices, Tensor, override
from collectives.arrays.torch_device import as_type
from collectives.arrays.vectors import Flat, empty_like, flat
from collectives.dense.device_sum import DIRECT_BYTES
from collectives.execution.call import Call, Steps
from collectives.execution.payload import MessageMemory, Payload
from collectives.execution.pipelined import execute
from collectives.execution.program import Program
from collectives.execution.staged import await_array, deliver, fetch, takes_device_memory
from collectives.execution.traffic import Traffic
from collectives.schedules.broadcast import Broadcast

PIECE_BYTES = 1 << 20
MOST_PIECES = 256  # longer vectors have longer pieces
# Bytes that a rank receives in one call of MPI, which counts in 32 bits. Only the end of the call shows progress: on a
# slow network a part has to take far less than a timeout, and on a fast one to end before waiting ranks begin to sleep.
PART_BYTES = 64 << 20


def broadcast_chain(nbytes: int, root: int) -> Broadcast:
    """Return the topology of a broadcast from GPU to GPU: a chain with one chunk per piece."""
    return Broadcast(root, max(1, min(MOST_PIECES, nbytes // PIECE_BYTES)))


def is_long(vector: Flat) -> bool:
    """Return whether ranks agree first on passing memory of GPUs to MPI; equal on all ranks."""
    return vector.values.nbytes >= DIRECT_BYTES


class BroadcastPayload(Payload):
    """Memory of a vector on a device, for a broadcast."""

    brief, receive_buffers = True, 0

    def __init__(self, program: Program, vector: Tensor) -> None:
        self._pieces, self._bytes = program.pieces, as_type(vector, "uint8")

    @override
    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        cut = self._pieces[piece]
        return [MPI.buffer.fromaddress(self._bytes[cut.start :].data_ptr(), len(cut)), len(cut), MPI.BYTE]

    replacing = outgoing


def broadcast_steps(
    call: Call, vector: Flat, root: int, check: Callable[[Indices | None], Steps], program: Callable[[], Program]
) -> Steps:
    """Overwrite an array of any memory, on all ranks except the root.

    `check` returns the steps in which the ranks compare the call. Its argument, a small array, is overwritten with the
    sum over the ranks; None, on all ranks: there is nothing to sum. `program` returns this rank's program of
    `broadcast_chain`, in bytes.
    """
    there, payload = vector.staging, vector.values.view(np.uint8)
    is_root, size = call.group.mpi_comm.rank == root, call.group.mpi_comm.size
    if size > 1 and is_long(vector):
        direct = there is not None and (yield from takes_device_memory(call, there.device.name))
        if there is not None and direct:
            yield from await_array(call, there.device)
        elif there is not None and is_root:
            yield from fetch(call, there)
        ready = np.array([direct], np.int64)
        yield from check(ready)
        if there is not None and ready[0] == size:
            if call.completion is not None:
                there.device.use()
            made = program()
            yield from execute(call, made, BroadcastPayload(made, there.vector), call.tag, Traffic())
            return
        if there is not None and direct and is_root:
            yield from fetch(call, there)
    else:
        if there is not None and is_root:
            yield from fetch(call, there)
        yield from check(None)
    yield from broadcast_payload(call, payload, root)
    if there is not None and not is_root:
        yield from deliver(call, there)


def all_gather_rows(call: Call, check: Steps, x: Array, rows: Flat) -> Steps:
    """Gather all ranks' rows, in rank order, to the result of a call; ranks may have different numbers of rows.

    `check` compares element type and shape of a row among the ranks. `x` are this rank's rows, and `rows` is their
    vector; the result has their kind of array, and their device.
    """
    yield from check
    count, *row_shape = rows.shape
    counts = yield from gather_sizes(call, count)
    result = empty_like(x, (int(counts.sum()), *row_shape))
    target = flat(result, (rows.dtype,))
    landing = target.values
    sizes = counts * (math.prod(row_shape) * landing.itemsize)
    yield from gather_payloads(call, rows.values.view(np.uint8), sizes, landing.view(np.uint8))
    if target.staging is not None:
        yield from deliver(call, target.staging)
    call.result = result


def broadcast_payload(call: Call, payload: Bytes, root: int) -> Steps:
    """Overwrite `payload`, equally long on all ranks, with that of rank `root`."""
    group = call.group
    yield from call.turn()
    for start in range(0, payload.size, PART_BYTES):
        part = payload[start : start + PART_BYTES]
        request = group.mpi_comm.Ibcast([part, part.size, MPI.BYTE], root)
        yield from group.await_request(
            call, request, lambda: f"{group.here}: nothing from rank {root} to be broadcast in {call.name()}"
        )


def gather_sizes(call: Call, size: int) -> Generator[bool, None, Indices]:
    """Return every rank's `size`, in rank order."""
    group = call.group
    yield from call.turn()
    sizes = np.empty(group.mpi_comm.size, np.int64)
    request = group.mpi_comm.Iallgather(np.array([size], np.int64), sizes)
    yield from group.await_request(call, request, lambda: f"{group.here}: sizes are missing in {call.name()}")
    return sizes


def gather_payloads(call: Call, payload: Bytes, sizes: Indices, out: Bytes) -> Steps:
    """Overwrite `out` with every rank's payload, in rank order; in several rounds if they are long.

    `sizes` are the bytes of all payloads. `out` shares no memory with `payload`.
    """
    group = call.group
    yield from call.turn()
    most = max(1, PART_BYTES // sizes.size)
    wholes = np.split(out, np.cumsum(sizes)[:-1])
    for start in range(0, int(sizes.max()), most):
        part, counts = slice(start, start + most), np.clip(sizes - start, 0, most)
        mine = payload[part]
        # each round has a part of every payload, so that no rank waits while a long payload goes round
        landing = out if counts.sum() == out.size else np.empty(counts.sum(), np.uint8)
        request = group.mpi_comm.Iallgatherv([mine, mine.size, MPI.BYTE], [landing, counts, MPI.BYTE])
        yield from group.await_request(call, request, lambda: f"{group.here}: payloads are missing in {call.name()}")
        if landing is not out:
            for landed, whole in zip(np.split(landing, np.cumsum(counts)[:-1]), wholes, strict=True):
                whole[part] = landed
