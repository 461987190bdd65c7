"""Table of the collectives: a row for each, by which every call is checked, packed, described and moved.

`bind_operands` applies a row to the tensors of a call. It does not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from collectives import Communicator
from collectives.execution.call import Call, Steps
from mpicomp.torch.process_group.tensor_memory import Operand, PackedTensors, StagingTensors, rows, split_sizes
from mpicomp.torch.process_group.transfers import (
    BoundCollective,
    Reduction,
    barrier,
    broadcast,
    exchange_splits,
    exchange_tensors,
    reduce,
    reduce_scatter,
    sum_sparse,
)
from mpicomp.torch.process_group.usable_tensors import require_dense, require_usable

Ranks = Literal["all", "root", "others"]
_NO_TENSOR = torch.empty(0, dtype=torch.float32, device="cpu")


class Form(Enum):
    """Form of the outputs or inputs of a rank."""

    ABSENT = "no tensors"
    ONE = "a list of one tensor"
    SEVERAL = "a list of tensors"
    SPARSE = "a list of one sparse tensor"
    WHOLE = "tensors, each as long as a row of its counterpart"
    ROWS = "tensors, each cut in a row for each rank"
    LIST = "a tensor for each rank"
    LISTS = "a list of tensors for each rank"
    EVEN = "a tensor cut along its first dimension, in equal parts"
    SPLIT = "a tensor cut along its first dimension, in parts of given lengths"


class Collective(NamedTuple):
    """Row of the table. A collective without inputs works in place."""

    name: str  # in errors and profiles
    outputs: Form
    inputs: Form
    text: str  # description that ranks compare; `parts` are bytes, or elements if the collective reduces
    move: Callable[[Communicator, Call, BoundCollective], Steps]  # after the ranks have agreed on the description
    senders: Ranks = "all"
    receivers: Ranks = "all"
    mixed_dtypes: bool = False
    compares: bool = False  # the ranks agree in `move`, where a short sum travels along


class Operands(NamedTuple):
    """Arguments of one call; the splits are lengths of output and input parts of form SPLIT."""

    outputs: Operand = ()
    inputs: Operand = ()
    root: int | None = None
    op: object = None
    splits: tuple[Sequence[int], Sequence[int]] = ((), ())


def bind_operands(row: Collective, comm: Communicator, operands: Operands, staging: StagingTensors) -> BoundCollective:
    """Check and pack the tensors of a call, where those on devices are replaced by host copies.

    Packed tensors have values if no tensor is on a device.

    Raises
    ------
    TypeError, ValueError
        The tensors do not fit the collective or each other.
    MemoryError
        Memory for host copies is short.
    """
    if row.outputs is Form.ABSENT:
        return BoundCollective(row.text, _NO_TENSOR, None, None, Reduction("", _NO_TENSOR.dtype), None)
    size, root, in_place, is_sparse = comm.size, operands.root, row.inputs is Form.ABSENT, row.outputs is Form.SPARSE
    if root is not None:
        require_rank(root, size)
    is_root = comm.rank == root
    sends, receives = (one == "all" or (one == "root") is is_root for one in (row.senders, row.receivers))
    outputs, inputs = [*leaves(operands.outputs)], [*leaves(operands.inputs)]
    require_usable(outputs, inputs, receives)
    operands = operands._replace(
        outputs=staging.stage(operands.outputs, read=in_place and sends, written=receives),
        inputs=staging.stage(operands.inputs, read=sends, written=False),
    )
    if staging:  # others have taken their places
        outputs, inputs = [*leaves(operands.outputs)], [*leaves(operands.inputs)]
    if is_sparse:
        n = len(outputs)
        require(n == 1, f"{n} tensors, of which some are sparse, cannot be one call: pass them singly")
        require(outputs[0].device.type == "cpu", f"the tensor is on {outputs[0].device}: pass tensor.cpu()")
    else:
        require_dense([*outputs, *inputs], row.mixed_dtypes)
    if Form.ROWS in (row.outputs, row.inputs):
        _require_rows(row, outputs, inputs, size)
    sent = received = _packed(row.outputs, operands.outputs, outputs, operands.splits[0], size)
    if not in_place:
        sent = _packed(row.inputs, operands.inputs, inputs, operands.splits[1], size).separate_from(received)
        _require_parts("output", received, receives, "input", sent, comm, root)
        _require_parts("input", sent, sends, "output", received, comm, root)
    if row.outputs is Form.EVEN and received.sizes != sent.sizes:
        raise ValueError(
            f"the input has {sent.flat.numel()} elements and the output {received.flat.numel()}: make them equal, or "
            "pass split sizes"
        )
    flat = outputs[0] if is_sparse else received.flat if received.sizes is None else sent.flat
    reduction = Reduction.of(operands.op, flat.dtype)
    if is_sparse and reduction.name not in ("SUM", "AVG"):
        raise ValueError(f"{reduction.name} of sparse tensors is not supported: sum them")
    text = _description(row, operands, flat, reduction.name, received.sizes or sent.sizes or ())
    if sends and not staging:
        sent.copy_in()
    return BoundCollective(text, flat, sent if sends else None, received if receives else None, reduction, root)


def _description(row: Collective, operands: Operands, flat: Tensor, op: str, parts: Sequence[int]) -> str:
    if operands.op is not None:
        parts = [nbytes // flat.element_size() for nbytes in parts]
    return row.text.format(
        root=operands.root,
        op=op,
        n=flat.numel(),
        dtype=str(flat.dtype).removeprefix("torch."),
        parts=f"{len(parts)} times {parts[0]}" if parts and len({*parts}) == 1 else parts,
        shape=f"{list(flat.shape)}, {flat.sparse_dim()} dimensions sparse" if row.outputs is Form.SPARSE else "",
    )


def leaves(operand: Operand) -> Iterator[Tensor]:
    """Yield the tensors of nested lists."""
    for one in operand:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from leaves(one)
        else:
            raise TypeError(f"{type(one).__name__} is not a tensor")


def _packed(form: Form, operand: Operand, tensors: list[Tensor], splits: Sequence[int], size: int) -> PackedTensors:
    n = len(tensors)
    if n == 0 and form in (Form.ONE, Form.SEVERAL):
        raise ValueError("the list of tensors is empty: pass one tensor or more")
    if n > 1 and form is Form.ONE:
        raise ValueError(f"the list has {n} tensors, and the call is of one: begin a call for each, or a coalesced one")
    if form in (Form.EVEN, Form.SPLIT):
        return PackedTensors(tensors, split_sizes(tensors[0], splits, size))
    if form is Form.ROWS:
        cut = [rows(tensor, size) for tensor in tensors]
        parts = [[one[rank] for one in cut] for rank in range(size)]
    elif form is Form.LISTS:
        parts = [[*leaves(part)] for part in operand]
    elif form is Form.LIST:
        lists = sum(isinstance(one, list | tuple) for one in operand)
        require(lists < 2, f"there are {lists} lists of tensors, and the call is of one")
        parts = [[tensor] for tensor in tensors]
    else:
        return PackedTensors([_NO_TENSOR] if form is Form.SPARSE else tensors)
    return PackedTensors([one for part in parts for one in part], [sum(one.nbytes for one in part) for part in parts])


def require(fits: bool, problem: str) -> None:
    """Raise ValueError with the problem unless the arguments fit."""
    if not fits:
        raise ValueError(problem)


def require_rank(rank: int, size: int) -> None:
    """Raise ValueError unless a group has this rank."""
    require(0 <= rank < size, f"there is no rank {rank} in this group of {size}")


def _require_rows(row: Collective, outputs: Sequence[Tensor], inputs: Sequence[Tensor], size: int) -> None:
    require(len(outputs) == len(inputs), f"there are {len(outputs)} outputs for {len(inputs)} inputs")
    tensors = {"output": outputs, "input": inputs}
    large, small = tensors if row.outputs is Form.ROWS else reversed(tensors)
    for one, other in zip(tensors[large], tensors[small], strict=True):
        require(
            one.dtype == other.dtype and one.numel() == other.numel() * size,
            f"the {large} has {one.numel()} {one.dtype}, and the {small} {other.numel()} {other.dtype}: the {large} "
            f"must be {size} times as large",
        )


def _require_parts(
    noun: str, packed: PackedTensors, used: bool, whole: str, other: PackedTensors, comm: Communicator, root: int | None
) -> None:
    """Raise ValueError unless there is a part for each rank, as long as tensors of the other side without parts."""
    sizes = packed.sizes
    if sizes is None:
        return
    if len(sizes) != comm.size * used:
        cure = "" if root is None else ": the root passes one for each rank, and other ranks pass none"
        raise ValueError(f"there are {len(sizes)} {noun}s for {comm.size} ranks{cure}")
    for rank in [comm.rank] if root is None else range(len(sizes)):
        if other.sizes is None and sizes[rank] != other.nbytes:
            whose = "this rank" if root is None else f"rank {rank}"
            raise ValueError(
                f"the {whole} has {other.nbytes} bytes, and the {noun} of {whose}, {sizes[rank]}: make them equal"
            )


_gather_all, _swap = partial(exchange_tensors, "Iallgatherv"), partial(exchange_tensors, "Ialltoallv")
_gather_on_root, _scatter_from_root = partial(exchange_tensors, "Igatherv"), partial(exchange_tensors, "Iscatterv")

BROADCAST = Collective(
    "broadcast", Form.ONE, Form.ABSENT, "broadcast from rank {root} of {n} {dtype}", broadcast, "root", "others"
)
ALL_REDUCE = Collective("all_reduce", Form.ONE, Form.ABSENT, "all_reduce ({op}) of {n} {dtype}", reduce, compares=True)
REDUCE = ALL_REDUCE._replace(name="reduce", text="reduce to rank {root} ({op}) of {n} {dtype}", receivers="root")
ALL_REDUCE_SPARSE = Collective(
    "all_reduce", Form.SPARSE, Form.ABSENT, "all_reduce ({op}) of sparse {dtype}{shape}", sum_sparse
)
ALL_GATHER = Collective(
    "all_gather", Form.LIST, Form.ONE, "all_gather of {parts} bytes of {dtype}", _gather_all, mixed_dtypes=True
)
REDUCE_SCATTER = Collective(
    "reduce_scatter", Form.ONE, Form.LIST, "reduce_scatter ({op}) of {parts} {dtype}", reduce_scatter
)
ALL_TO_ALL_EVEN = Collective("all_to_all", Form.EVEN, Form.EVEN, "all_to_all of {parts} bytes of {dtype}", _swap)
ALL_TO_ALL = Collective("all_to_all", Form.LIST, Form.LIST, "all_to_all of split sizes in {dtype}", exchange_splits)
GATHER = Collective(
    "gather", Form.LIST, Form.ONE, "gather with root {root} of {n} {dtype}", _gather_on_root, "all", "root"
)
SCATTER = Collective(
    "scatter", Form.ONE, Form.LIST, "scatter with root {root} of {n} {dtype}", _scatter_from_root, "root"
)
BARRIER = Collective("barrier", Form.ABSENT, Form.ABSENT, "barrier", barrier)
ALL_REDUCE_SEVERAL = ALL_REDUCE._replace(outputs=Form.SEVERAL)
ALL_GATHER_SEVERAL = ALL_GATHER._replace(outputs=Form.LISTS, inputs=Form.SEVERAL)
ALL_GATHER_SINGLE = ALL_GATHER._replace(outputs=Form.ROWS, inputs=Form.WHOLE)
REDUCE_SCATTER_SINGLE = REDUCE_SCATTER._replace(outputs=Form.WHOLE, inputs=Form.ROWS)
ALL_TO_ALL_SPLIT = ALL_TO_ALL._replace(outputs=Form.SPLIT, inputs=Form.SPLIT)
