"""Dense sums of a communicator: choice of the way that a vector goes, and receive buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes, FloatArray
from collectives.arrays.elements import COMBINE, NARROW, Combine, add, aligned_empty, narrow, widen
from collectives.arrays.vectors import Flat, crossing
from collectives.dense.device_sum import are_on_one_device, copy_on_device, sum_on_device
from collectives.dense.host_sum import DensePayload, itemsize_in_messages
from collectives.errors import CollectiveMismatch, OutOfMemory
from collectives.execution.call import Call, Steps
from collectives.execution.pipelined import execute
from collectives.execution.program import Program
from collectives.execution.staged import stage
from collectives.execution.traffic import Traffic
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.ring import Ring

if TYPE_CHECKING:
    from collectives.group.group import Group

PIECE_BYTES = 1 << 20
# Within a node a message costs more than an addition that waits for a whole message, and most if ranks share cores: a
# rank that waits for a piece gives its core away, and gets it back after a time slice.
NODE_PIECE_BYTES = 1 << 22
SHORT_BYTES = 1 << 17  # messages below this cost more on fast networks than they save on slow ones
RECEIVE_BUFFERS = 3
# From this length on "auto" takes the ring, below it MPI's own all-reduce: bytes per rank, and bytes in all.
RING_BYTES_A_RANK, RING_BYTES = 512 << 10, 4 << 20


def dense_steps(
    comm: Group,
    call: Call,
    values: FloatArray,
    dtype: str,
    mean: bool,
    out: FloatArray,
    traffic: Traffic,
    scratch: Sequence[FloatArray] | None = None,
    mark: int | None = None,
    combine: Combine = add,
    overlapped: bool = False,
) -> Steps:
    """Sum or average flat vectors by the fastest way, as part of a call on which the ranks have agreed.

    Parameters
    ----------
    call : Call
    values : ndarray[n]
        bfloat16 is uint16. Of a 16-bit dtype also a float32 copy, which is overwritten.
    dtype : str
        Element type: NumPy does not know bfloat16.
    mean : bool
        Divide by the number of ranks.
    out : ndarray[n]
        Overwritten with the result; may be `values`.
    traffic : Traffic
        Counted into.
    scratch : sequence of ndarray, optional
        Memory for receive buffers; overwritten. With it, though it may be empty, messages are no longer than 1 MiB,
        so that a method which needs little memory keeps little for its dense rounds.
    mark : int, optional
        Fingerprint of the call where the ranks have not agreed yet: they then do so before the sum, or with it.
    combine : Combine
        Operation in place of the sum, in calls with a mark.
    overlapped : bool
        Work goes on meanwhile, so that the pipelined executor runs the program; the bits are the same.
    """
    small, itemsize = is_small(comm, values, dtype), itemsize_in_messages(values, dtype)
    if mark is not None and not small:
        yield from comm.check(call, mark, traffic)
    if comm.size == 1:
        if values.dtype == out.dtype:
            out[:] = values
        else:
            narrow(values, dtype, out)
    elif small or _by_mpi(comm, values.size * itemsize, combine):
        start = traffic.clock()
        source, sums = _operands(values, dtype, out)
        if not small:
            yield from _mpi_allreduce(comm, call, source, sums, dtype in NARROW, traffic)
        elif mark is None:
            yield from call.turn()
            yield from comm.call_check.sum(call, source, sums, traffic)
        else:
            yield from comm.check(call, mark, traffic, source, sums, combine=combine)
        _finish(comm.size, sums, dtype, mean, out)
        traffic.seconds_total += traffic.clock() - start
    else:
        alone = call.is_alone and not overlapped
        program = sum_program(comm, values.size, itemsize, scratch is not None)
        nbytes = program.longest_piece * itemsize
        landing = _buffers(comm, scratch or (), nbytes) if alone else allocate_buffers(nbytes)
        payload = DensePayload(program, values, dtype, mean, landing, out, combine)
        yield from execute(call, program, payload, call.tag, traffic, overlapped=overlapped)


def sum_arrays(
    comm: Group,
    call: Call,
    source: Flat,
    target: Flat,
    op: str,
    traffic: Traffic,
    mark: int | None = None,
    background: bool = False,
    scratch: Sequence[FloatArray] | None = None,
) -> Steps:
    """Return the steps of a sum of arrays in any memory, `target` of which is overwritten; see `dense_steps`.

    In the background the bits are the same.
    """
    combine, mean = COMBINE[op], op == "mean"
    dtype, rest = source.dtype, (traffic, scratch, mark, combine, background)
    if source.place is None and target.place is None:
        return dense_steps(comm, call, source.values, dtype, mean, target.values, *rest)

    def through_host() -> Steps:
        here, there = crossing(source), crossing(target)
        steps = dense_steps(comm, call, here.values, dtype, mean, there.values, *rest)
        return stage(call, steps, here.staging, there.staging)

    itemsize = itemsize_in_messages(source.values, dtype)
    nbytes = source.values.size * itemsize
    small = is_small(comm, source.values, dtype) or _by_mpi(comm, nbytes, combine)
    if not are_on_one_device(source, target) or (small and comm.size > 1):
        try:
            return through_host()
        except MemoryError as error:
            comm.reject(MemoryError(f"{comm.here}, allreduce({op}): {error}"), f"allreduce({op})")
    check: Steps = iter(()) if mark is None else comm.check(call, mark, traffic)
    if comm.size == 1:
        return copy_on_device(call, source, target, check)
    program = sum_program(comm, source.values.size, itemsize, scratch is not None)

    def instead() -> Steps:
        try:
            return through_host()
        except MemoryError as error:
            assert mark is not None  # without a mark the vectors already have memory of the host
            return _refused(comm, call, mark, error)

    return sum_on_device(call, program, nbytes, source, target, op, traffic, check, instead, background)


def _buffers(comm: Group, scratch: Sequence[FloatArray], nbytes: int) -> list[Bytes]:
    """Return receive buffers: scratch arrays of the caller, then memory that is kept between calls."""
    borrowed = [array.reshape(-1).view(np.uint8) for array in scratch if array.nbytes >= nbytes][:RECEIVE_BUFFERS]
    missing = RECEIVE_BUFFERS - len(borrowed)
    if nbytes > NODE_PIECE_BYTES:
        return borrowed + allocate_buffers(nbytes)[:missing]
    kept = comm.dense_buffers
    if any(buffer.nbytes < nbytes for buffer in kept):
        kept.clear()
    while len(kept) < missing:
        kept.append(aligned_empty(nbytes, np.uint8))
    return borrowed + kept[:missing]


def _refused(comm: Group, call: Call, mark: int, error: MemoryError) -> Steps:
    """Raise an error here, and CollectiveMismatch on the ranks that make the call."""
    name, rejection = call.name(), f"rank {comm.rank} rejects {call.name()}: {error}"
    call.name = lambda: rejection
    closes = True  # stays so if the ranks compare nothing
    try:
        yield from comm.check(call, mark ^ (1 + comm.rank))  # differs from the mark of every other rank
    except CollectiveMismatch as mismatch:
        closes = mismatch.closes
    raise OutOfMemory(f"{comm.here}, {name}: {error}", closes) from error


def is_small(comm: Group, values: FloatArray, dtype: str) -> bool:
    """Return whether a vector is summed together with the check of the call."""
    nbytes = values.size * itemsize_in_messages(values, dtype)
    return comm.size > 1 and comm.topology == "auto" and nbytes <= comm.call_check.most_bytes


def allocate_buffers(nbytes: int) -> list[Bytes]:
    """Return receive buffers for one call."""
    return [aligned_empty(nbytes, np.uint8) for _ in range(RECEIVE_BUFFERS)]


def sum_program(comm: Group, n: int, itemsize: int, short: bool) -> Program:
    """Return the program of a sum of elements that take `itemsize` bytes in messages; equal for all kinds of memory."""
    known = comm.routes.network is not None or not isinstance(comm.topology, str)
    topology = comm.routes.select(n * itemsize) if known else Ring()
    return comm.routes.program(topology, n, 64, max(1, _piece_bytes(comm, topology, short) // itemsize))


def _piece_bytes(comm: Group, topology: Topology, short: bool) -> int:
    """Return the length of the longest message."""
    if comm.options.piece_bytes:
        return comm.options.piece_bytes
    if comm.one_node:
        return PIECE_BYTES if short else NODE_PIECE_BYTES
    # Long messages cost least. But two hosts that swap messages over TCP must not exchange hand-shakes first: the
    # answer waits behind the megabytes that its sender has passed to the kernel before, so that the two hosts send one
    # after the other, which takes twice as long.
    eager = comm.routes.packed_piece_bytes()
    swapping = comm.size == 2 or isinstance(topology, HalvingDoubling)
    return eager if swapping and eager >= SHORT_BYTES else PIECE_BYTES


def _by_mpi(comm: Group, nbytes: int, combine: Combine) -> bool:
    if combine is not add:  # MPI does not define its minimum and maximum for NaN
        return False
    if comm.call_check.has_checksums and comm.topology == "auto":  # MPI's own messages have no checksums
        return False
    own = min(RING_BYTES, RING_BYTES_A_RANK * comm.size)
    return comm.topology == "mpi" or (comm.topology == "auto" and nbytes < own)


def _operands(values: FloatArray, dtype: str, out: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the vector to sum and the vector for the sums: float32 ones for 16-bit values."""
    if dtype not in NARROW:
        return values, out
    if values.dtype == np.float32:
        return values, values
    sums = np.empty(values.size, np.float32)
    widen(values, dtype, sums)
    return sums, sums


def _finish(ranks: int, sums: FloatArray, dtype: str, mean: bool, out: FloatArray) -> None:
    """Divide a sum, and round it."""
    if mean:
        np.divide(sums, ranks, out=sums)
    if sums is not out:
        narrow(sums, dtype, out)


def _mpi_allreduce(
    comm: Group, call: Call, source: FloatArray, sums: FloatArray, in_place: bool, traffic: Traffic
) -> Steps:
    yield from call.turn()
    # MPI reduces in place on all ranks or on none, and only this rank knows its `out`: so `out` must not decide.
    if not in_place and np.may_share_memory(source, sums):
        source = source.copy()
    # mpi4py derives no type for memory that is not aligned
    kind = MPI.Datatype.fromcode(sums.dtype.char)
    message = MPI.IN_PLACE if in_place else [source, sums.size, kind]
    request = comm.mpi_comm.Iallreduce(message, [sums, sums.size, kind])
    missing = f"{comm.here}: MPI's all-reduce does not end"
    yield from comm.await_request(call, request, lambda: missing, "MPI's all-reduce")
    rounds = math.ceil(math.log2(comm.size))
    traffic.messages += rounds
    traffic.bytes_sent += (
        sums.nbytes * rounds if sums.nbytes < 10_000 else 2 * sums.nbytes * (comm.size - 1) // comm.size
    )
