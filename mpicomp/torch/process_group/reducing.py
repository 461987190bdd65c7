"""The collectives of `torch.distributed` that reduce dense tensors; they raise TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from collectives import Communicator
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.operation import (
    Operation,
    counted,
    named_dtype,
    require,
    require_dense,
    require_pairs,
    require_root,
)
from mpicomp.torch.process_group.packed import Packed, rows
from mpicomp.torch.process_group.reduction import Reduction, reduce, reduce_scatter


def all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: Any) -> Operation:
    """Reduce tensors in place, on all ranks."""
    return reduce_to(comm, tensors, op, None)


def reduce_to(comm: Communicator, tensors: Sequence[Tensor], op: Any, root: int | None) -> Operation:
    """Reduce tensors in place, on the root, or on all ranks where there is none."""
    require_dense(tensors)
    packed = Packed(tensors)
    reduction = Reduction.of(op, packed.flat.dtype)
    if root is not None:
        require_root(comm, root)
    receives = root in (None, comm.rank)

    def steps(comm: Communicator, call: Call, mark: int) -> Steps:
        return reduce(comm, call, mark, reduction, packed.flat, root)

    name = "all_reduce" if root is None else f"reduce to rank {root}"
    text = f"{name} ({reduction.name}) of {packed.flat.numel()} {named_dtype(packed.flat.dtype)}"
    return Operation(text, steps, tensors, [packed] if receives else [], agrees=True)


def scatter_reduced(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: Any
) -> Operation:
    """Reduce `inputs[r]` of all ranks into the outputs of rank r; sizes may differ from rank to rank."""
    everything = [tensor for one in inputs for tensor in one]
    require_dense([*everything, *outputs])
    require(len(inputs) == comm.size, f"there are {len(inputs)} inputs for {comm.size} ranks")
    received = Packed(outputs, filled=False)
    counts = [sum(tensor.numel() for tensor in one) for one in inputs]
    require(
        received.flat.numel() == counts[comm.rank],
        f"the output has {received.flat.numel()} elements, and the input for this rank {counts[comm.rank]}",
    )
    reduction = Reduction.of(op, received.flat.dtype)
    values = reduction.scaled(Packed(everything).flat)

    def steps(comm: Communicator, call: Call) -> Steps:
        return reduce_scatter(comm, call, reduction, values, counts, received.flat)

    text = f"reduce_scatter ({reduction.name}) of {counted(counts)} {named_dtype(received.flat.dtype)}"
    return Operation(text, steps, outputs, [received])


def scatter_reduced_single(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any
) -> Operation:
    """Reduce one tensor of all ranks, or several, each rank getting an equal part of each."""
    require_dense([*outputs, *inputs])
    require_pairs(outputs, inputs)
    for one, other in zip(outputs, inputs, strict=True):
        require(
            one.numel() * comm.size == other.numel(),
            f"the input has {other.numel()} elements, and the output {one.numel()}: the input must be {comm.size} "
            "times as large",
        )
    cut = [rows(tensor, comm.size) for tensor in inputs]
    return scatter_reduced(comm, outputs, [[one[rank] for one in cut] for rank in range(comm.size)], op)
