"""Steps that move and reduce tensors' memory between ranks.

Bytes travel by MPI's non-blocking collectives, or by plain messages where counts overflow these.

Sums and means of the common dtypes use the communicator's own all-reduce. All other reductions go by parts: each rank
owns a part of the vector, receives all ranks' values of it, and combines them in the order of ranks. So each operation
is one function of PyTorch, results do not depend on the number of messages, and all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from collectives import CollectiveMismatch, Communicator
from collectives.annotations import Bytes
from collectives.arrays.elements import FLOATS, INTEGERS
from collectives.consistency.descriptions import fingerprint
from collectives.execution.call import Call, Steps
from collectives.execution.traffic import Traffic
from collectives.progress.polling import until
from mpicomp.torch.process_group.tensor_memory import PackedTensors, Segment, as_array, as_bytes

LARGEST_COUNT = (1 << 31) - 1  # MPI has counts and displacements of type int
LARGEST_MESSAGE_BYTES = 1 << 30
LARGEST_GATHERED_BYTES = 1 << 16  # every rank receives all values of such a vector and combines them itself
_REPORT_BYTES = 256  # of a rank's report of sizes that differ

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)
_REDUCIBLE = (torch.bool, *_INTEGERS, *_HALVES, torch.float32, torch.float64, *_COMPLEX)


class Reduction(NamedTuple):
    """Rule by which vectors of one dtype are reduced."""

    name: str  # of the `ReduceOp`
    dtype: torch.dtype
    factor: float | Tensor | None = None  # multiplier of this rank's values

    @classmethod
    def of(cls, op: object, dtype: torch.dtype) -> Reduction:
        """Return the rule of a `ReduceOp`, or of none. Raises TypeError if it does not fit the dtype."""
        if op is None:
            return cls("", dtype)
        exact: Any = ReduceOp(op) if isinstance(op, ReduceOp.RedOpType) else op
        kind, factor = exact.__getstate__()
        name = str(kind.name)
        refused = (
            name not in _COMBINE
            or dtype not in _REDUCIBLE
            or (name in ("BAND", "BOR", "BXOR") and dtype not in (torch.bool, *_INTEGERS))
            or (name in ("MIN", "MAX") and dtype in _COMPLEX)
            or (name == "AVG" and dtype == torch.bool)
        )
        if refused:
            raise TypeError(f"{name} of {dtype} is not supported: convert the tensor or choose another operation")
        return cls(name, dtype, factor)

    @property
    def mean(self) -> bool:
        """True if the sum is divided by the number of ranks."""
        return self.name == "AVG"

    @property
    def is_dense_sum(self) -> bool:
        """True if the communicator's own all-reduce computes it."""
        known = FLOATS if self.mean else (*FLOATS, *INTEGERS)
        return _COMBINE[self.name] is torch.add and str(self.dtype).removeprefix("torch.") in known

    def scaled(self, values: Tensor) -> Tensor:
        """Multiply this rank's values by the factor, if there is one."""
        return values if self.factor is None else (values * self.factor).to(self.dtype)

    def combine(self, values: Tensor, out: Tensor) -> None:
        """Reduce the ranks' values [ranks, n] in order, 16-bit floats in float32; `out` [n] is overwritten."""
        combine = _COMBINE[self.name]
        total = values[0].to(torch.float32 if self.dtype in _HALVES else self.dtype, copy=True)
        for row in values[1:]:
            combine(total, row, out=total)
        if self.mean:
            total.div_(len(values), rounding_mode="trunc" if self.dtype in _INTEGERS else None)
        with torch.inference_mode():  # tensors made in this mode can be written in this mode alone
            out.copy_(total)


class BoundCollective(NamedTuple):
    """One call of a collective, with tensors that are checked and packed."""

    text: str  # description that all ranks must agree on
    flat: Tensor  # packed tensors without parts, which are as long on all ranks; or else those that are sent
    sent: PackedTensors | None  # None: this rank does not send
    received: PackedTensors | None  # the same as `sent` in a call in place
    reduction: Reduction
    root: int | None


def exchange_tensors(native: str, comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Move a call's tensors by a function of MPI, such as ``Iallgatherv``."""
    sent, received, root = bound.sent, bound.received, bound.root
    longest = max(side.nbytes for side in (sent, received) if side) if root is None else bound.flat.nbytes * comm.size
    return exchange_segments(comm, call, native, sent, received, longest, root)


def exchange_segments(
    comm: Communicator,
    call: Call,
    native: str,
    sent: Segment | None,
    received: Segment | None,
    longest_bytes: int,
    root: int | None = None,
) -> Steps:
    """Move segments by a function of MPI. If there is a root, it alone has both.

    `longest_bytes` is the length of the longest segment of any rank, so that all ranks choose the same way.
    """
    yield from call.turn()
    mpi_comm = comm.mpi_comm
    if longest_bytes <= LARGEST_COUNT:
        buffers = [None if segment is None else segment.mpi_buffer() for segment in (sent, received)]
        request = getattr(mpi_comm, native)(*buffers, *([] if root is None else [root]))
        missing = f"{comm.here}: not all ranks take part in {call.name()}"
        yield from comm.await_request(call, request, lambda: missing)
        return
    requests: list[MPI.Request] = []
    call.owners = (*call.owners, requests)
    for peer, part in received.parts(comm.size, root) if received else ():
        requests += [mpi_comm.Irecv([piece, piece.size, MPI.BYTE], peer, call.tag) for piece in _pieces(part)]
    for peer, part in sent.parts(comm.size, root) if sent else ():
        requests += [mpi_comm.Isend([piece, piece.size, MPI.BYTE], peer, call.tag) for piece in _pieces(part)]
    call.describe = lambda: f"{comm.here}: messages of {call.name()} are missing"
    for request in requests:
        yield from until(request, call)


def _pieces(memory: Bytes) -> Iterator[Bytes]:
    return (memory[start : start + LARGEST_MESSAGE_BYTES] for start in range(0, memory.size, LARGEST_MESSAGE_BYTES))


def exchange_splits(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Move parts of any lengths from each rank to each, once the ranks have compared the lengths."""
    sent, received = bound.sent, bound.received
    assert sent
    assert received
    longest_bytes = yield from agree_on_sizes(comm, call, sent.sizes or (), received.sizes or ())
    yield from exchange_segments(comm, call, "Ialltoallv", sent, received, longest_bytes)


def agree_on_sizes(
    comm: Communicator, call: Call, sent: Sequence[int], received: Sequence[int]
) -> Generator[bool, None, int]:
    """Return the length in bytes of the longest segment of any rank.

    Raises CollectiveMismatch on every rank unless the sizes that each rank sends are those that its peers expect.
    """
    yield from call.turn()
    mpi_comm, missing = comm.mpi_comm, f"{comm.here}: sizes of {call.name()} are missing"
    coming = np.empty(comm.size, np.int64)
    yield from comm.await_request(call, mpi_comm.Ialltoall(np.array(sent, np.int64), coming), lambda: missing)
    wrong = np.flatnonzero(coming != np.array(received, np.int64))
    mine = np.array([wrong.size, max(sum(sent), sum(received))], np.int64)
    largest = np.empty_like(mine)
    yield from comm.await_request(call, mpi_comm.Iallreduce(mine, largest, MPI.MAX), lambda: missing)
    if largest[0]:
        text = "".join(
            f"rank {comm.rank} awaits {received[peer]} bytes of rank {peer}, which sends {coming[peer]}; "
            for peer in wrong[:1]
        )
        reports = np.zeros((comm.size, _REPORT_BYTES), np.uint8)
        report = np.frombuffer(text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0"), np.uint8)
        yield from comm.await_request(call, mpi_comm.Iallgather(report, reports), lambda: missing)
        found = "".join(bytes(row).rstrip(b"\0").decode() for row in reports)
        raise CollectiveMismatch(f"the ranks differ in the sizes of {call.name()}: {found}make the split sizes match")
    return int(largest[1])


def broadcast(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Overwrite tensors with the root's."""
    yield from call.turn()
    missing = f"{comm.here}: nothing from rank {bound.root} to be broadcast"
    for piece in _pieces(as_bytes(bound.flat)):
        request = comm.mpi_comm.Ibcast([piece, piece.size, MPI.BYTE], bound.root or 0)
        yield from comm.await_request(call, request, lambda: missing)


def barrier(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Wait for all ranks."""
    yield from call.turn()
    request = comm.mpi_comm.Ibarrier()
    yield from comm.await_request(call, request, lambda: f"{comm.here}: not all ranks reach {call.name()}")


def reduce(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Reduce tensors in place, on the root or, without a root, on all ranks; the ranks compare the call first."""
    reduction, values, root, mark = bound.reduction, bound.flat, bound.root, fingerprint(bound.text)
    own = reduction.scaled(values)
    if root is None and reduction.is_dense_sum:
        dtype = str(reduction.dtype).removeprefix("torch.")
        source, out = (as_array(one, "uint16" if dtype == "bfloat16" else dtype) for one in (own, values))
        yield from comm.dense_steps(call, source, dtype, reduction.mean, out, Traffic(), mark=mark)
        return
    yield from comm.check(call, mark)
    native, receives = ("Iallgatherv", True) if root is None else ("Igatherv", comm.rank == root)
    n, itemsize, ranks = values.numel(), values.element_size(), comm.size
    nbytes = n * itemsize
    if nbytes * ranks <= LARGEST_GATHERED_BYTES:
        everything = torch.empty(ranks, n, dtype=values.dtype, device=values.device) if receives else None
        landing = None if everything is None else Segment(everything.view(-1), [nbytes] * ranks)
        yield from exchange_segments(comm, call, native, Segment(own), landing, nbytes * ranks, root)
        if everything is not None:
            reduction.combine(everything, values)
        return
    counts = [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    part = torch.empty(counts[comm.rank], dtype=values.dtype, device=values.device)
    yield from _reduce_parts(comm, call, reduction, own, counts, part)
    landing = Segment(values, [count * itemsize for count in counts]) if receives else None
    yield from exchange_segments(comm, call, native, Segment(part), landing, nbytes, root)


def reduce_scatter(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Reduce tensors, of which each rank receives a part."""
    assert bound.sent
    values = bound.reduction.scaled(bound.sent.flat)
    counts = [nbytes // values.element_size() for nbytes in bound.sent.sizes or ()]
    return _reduce_parts(comm, call, bound.reduction, values, counts, bound.flat)


def _reduce_parts(
    comm: Communicator, call: Call, reduction: Reduction, values: Tensor, counts: Sequence[int], out: Tensor
) -> Steps:
    """Reduce scaled values; rank r receives a part of ``counts[r]`` elements in `out`."""
    itemsize, mine = values.element_size(), counts[comm.rank]
    received = torch.empty(comm.size, mine, dtype=values.dtype, device=values.device)
    sent = Segment(values, [count * itemsize for count in counts])
    landing = Segment(received.view(-1), [mine * itemsize] * comm.size)
    yield from exchange_segments(comm, call, "Ialltoallv", sent, landing, comm.size * max(counts) * itemsize)
    reduction.combine(received, out)


def sum_sparse(comm: Communicator, call: Call, bound: BoundCollective) -> Steps:
    """Sum a tensor in COO layout in place: gather all ranks' entries, and add those with equal indices."""
    tensor = bound.flat
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    entries = np.empty(comm.size, np.int64)
    yield from call.turn()
    request = comm.mpi_comm.Iallgather(np.array([indices.shape[1]], np.int64), entries)
    missing = f"{comm.here}: the ranks' numbers of entries are missing for {call.name()}"
    yield from comm.await_request(call, request, lambda: missing)
    places = yield from _gather_rows(comm, call, indices.t().contiguous(), entries.tolist())
    everything = yield from _gather_rows(comm, call, values.contiguous(), entries.tolist())
    total = torch.sparse_coo_tensor(
        places.t(), everything, tensor.shape, dtype=everything.dtype, device=everything.device
    ).coalesce()
    # into the tensor itself: a detached one has entries of its own
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.copy_(total / comm.size if bound.reduction.mean else total)


def _gather_rows(comm: Communicator, call: Call, rows: Tensor, counts: Sequence[int]) -> Generator[bool, None, Tensor]:
    everything = torch.empty(sum(counts), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    row = everything[:1].numel() * everything.element_size()
    sizes = [count * row for count in counts]
    landing = Segment(everything.view(-1), sizes)
    yield from exchange_segments(comm, call, "Iallgatherv", Segment(rows.view(-1)), landing, sum(sizes))
    return everything
