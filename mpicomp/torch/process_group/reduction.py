"""What `ReduceOp` does to which dtype, and how ranks reduce a vector.

Sums and means of the usual types take the communicator's own all-reduce. Everything else goes by parts: each rank owns
a part of the vector, receives every rank's values of it, and combines them in the order of ranks. So each operation is
one function of PyTorch, results do not depend on the number of messages, and all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from collectives import Communicator
from collectives.arrays.elements import FLOATS, INTEGERS
from collectives.execution.handle import Call, Steps
from collectives.trace.traffic import Traffic
from mpicomp.torch.process_group.movement import Exchange, Side
from mpicomp.torch.process_group.packed import as_array, as_bytes

GATHERED_BYTES = 1 << 16  # up to this every rank gets all values and combines them itself

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
_BITWISE = ("BAND", "BOR", "BXOR")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_HALVES = (torch.float16, torch.bfloat16)
_COMPLEX = (torch.complex64, torch.complex128)
_TYPES = (torch.bool, *_INTEGERS, *_HALVES, torch.float32, torch.float64, *_COMPLEX)


class Reduction(NamedTuple):
    """How vectors of one dtype are reduced.

    Attributes
    ----------
    name : str
        Of the `ReduceOp`.
    dtype : torch.dtype
    factor : float, Tensor or None
        What this rank's values are multiplied by before.
    """

    name: str
    dtype: torch.dtype
    factor: Any = None

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype) -> Reduction:
        """Of a `ReduceOp`.

        Raises
        ------
        TypeError
            The dtype cannot be reduced so.
        """
        exact: Any = ReduceOp(op) if isinstance(op, ReduceOp.RedOpType) else op
        kind, factor = exact.__getstate__()
        name = str(kind.name)
        refused = (
            name not in _COMBINE
            or dtype not in _TYPES
            or (name in _BITWISE and dtype not in (torch.bool, *_INTEGERS))
            or (name in ("MIN", "MAX") and dtype in _COMPLEX)
            or (name == "AVG" and dtype == torch.bool)
        )
        if refused:
            raise TypeError(f"{name} of {dtype} is not supported: convert the tensor or choose another operation")
        return cls(name, dtype, factor)

    @property
    def mean(self) -> bool:
        """Whether the sum is divided by the number of ranks."""
        return self.name == "AVG"

    @property
    def is_dense_sum(self) -> bool:
        """Whether the communicator's own all-reduce can do it."""
        known = FLOATS if self.mean else (*FLOATS, *INTEGERS)
        return _COMBINE[self.name] is torch.add and str(self.dtype).removeprefix("torch.") in known

    def scaled(self, values: Tensor) -> Tensor:
        """Values of this rank, multiplied where the operation asks for it."""
        return values if self.factor is None else (values * self.factor).to(self.dtype)

    def combine(self, values: Tensor, out: Tensor) -> None:
        """Reduce the ranks' values [ranks, n] in order, 16-bit floats in float32; `out` [n] is overwritten."""
        combine = _COMBINE[self.name]
        total = values[0].to(torch.float32 if self.dtype in _HALVES else self.dtype, copy=True)
        for row in values[1:]:
            combine(total, row, out=total)
        if self.mean:
            total.div_(len(values), rounding_mode="trunc" if self.dtype in _INTEGERS else None)
        out.copy_(total)


def reduce(
    comm: Communicator, call: Call, mark: int, reduction: Reduction, values: Tensor, root: int | None = None
) -> Steps:
    """Reduce a vector of every rank.

    Parameters
    ----------
    comm : Communicator
    call : Call
    mark : int
        Fingerprint of the call, which the ranks compare first.
    reduction : Reduction
    values : Tensor[n]
        Overwritten with the result on the root, and left alone elsewhere.
    root : int, optional
        None: every rank is.
    """
    own = reduction.scaled(values)
    if root is None and reduction.is_dense_sum:
        dtype = str(reduction.dtype).removeprefix("torch.")
        source, out = (as_array(one, "uint16" if dtype == "bfloat16" else dtype) for one in (own, values))
        yield from comm.dense_steps(call, source, dtype, reduction.mean, out, Traffic(), mark=mark)
        return
    yield from comm.check(call, mark)
    name, receives = ("Iallgatherv", True) if root is None else ("Igatherv", comm.rank == root)
    n, itemsize, ranks = values.numel(), values.element_size(), comm.size
    nbytes = n * itemsize
    if nbytes * ranks <= GATHERED_BYTES:
        everything = torch.empty(ranks, n, dtype=values.dtype) if receives else None
        landing = None if everything is None else Side(as_bytes(everything.view(-1)), [nbytes] * ranks)
        yield from Exchange(name, Side(as_bytes(own)), landing, nbytes * ranks, root).steps(comm, call)
        if everything is not None:
            reduction.combine(everything, values)
        return
    counts = [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    part = torch.empty(counts[comm.rank], dtype=values.dtype)
    yield from reduce_scatter(comm, call, reduction, own, counts, part)
    landing = Side(as_bytes(values), [count * itemsize for count in counts]) if receives else None
    yield from Exchange(name, Side(as_bytes(part)), landing, nbytes, root).steps(comm, call)


def reduce_scatter(
    comm: Communicator, call: Call, reduction: Reduction, values: Tensor, counts: Sequence[int], out: Tensor
) -> Steps:
    """Reduce a vector of every rank, of which each gets a part, as part of a call on which the ranks have agreed.

    Parameters
    ----------
    comm : Communicator
    call : Call
    reduction : Reduction
    values : Tensor[sum(counts)]
        Scaled already.
    counts : sequence of int
        Elements of each rank's part.
    out : Tensor[counts[rank]]
        Overwritten.
    """
    itemsize, mine = values.element_size(), counts[comm.rank]
    received = torch.empty(comm.size, mine, dtype=values.dtype)
    sent = Side(as_bytes(values), [count * itemsize for count in counts])
    landing = Side(as_bytes(received.view(-1)), [mine * itemsize] * comm.size)
    yield from Exchange("Ialltoallv", sent, landing, comm.size * max(counts) * itemsize).steps(comm, call)
    reduction.combine(received, out)
