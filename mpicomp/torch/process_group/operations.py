"""The collectives of `torch.distributed`: what the ranks agree on, what moves, and where it ends up.

Every function here checks the arguments of this rank, communicates nothing, and raises TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collectives import Communicator
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group import movement
from mpicomp.torch.process_group.movement import Exchange, Side
from mpicomp.torch.process_group.packed import Packed, rows, split_along_first
from mpicomp.torch.process_group.reduction import Reduction, reduce, reduce_scatter


class Operation(NamedTuple):
    """One collective of one rank.

    Attributes
    ----------
    text : str
        What all ranks must agree on.
    steps : callable
        Carries it out, given the communicator and the call.
    result : sequence of Tensor
        What its future holds.
    received : sequence of Packed
        To be unpacked at the end.
    agrees : bool
        `steps` takes the call's fingerprint too, and has the ranks compare it.
    """

    text: str
    steps: Callable[..., Steps]
    result: Sequence[Tensor] = ()
    received: Sequence[Packed] = ()
    agrees: bool = False


def require_dense(tensors: Sequence[Tensor], one_dtype: bool = True) -> None:
    """Raise TypeError or ValueError unless all are tensors in the memory of this process that messages can carry."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{type(tensor).__name__} is not a tensor")
        if tensor.device.type != "cpu":
            raise ValueError(f"the tensor is on {tensor.device}, and this backend takes CPU tensors: pass tensor.cpu()")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"the tensor is {tensor.layout} of {tensor.dtype}: pass a dense one")
    dtypes = {tensor.dtype for tensor in tensors}
    if one_dtype and len(dtypes) > 1:
        raise TypeError(f"the tensors differ in dtype: {', '.join(sorted(map(str, dtypes)))}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require(fits: bool, problem: str) -> None:
    """Raise ValueError with the problem unless the arguments fit."""
    if not fits:
        raise ValueError(problem)


def _require_root(comm: Communicator, root: int) -> None:
    require(0 <= root < comm.size, f"there is no rank {root} in this group of {comm.size}")


def all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: Any) -> Operation:
    """Reduce tensors in place, on all ranks."""
    return reduce_to(comm, tensors, op, None)


def reduce_to(comm: Communicator, tensors: Sequence[Tensor], op: Any, root: int | None) -> Operation:
    """Reduce tensors in place, on the root, or on all ranks where there is none."""
    require_dense(tensors)
    packed = Packed(tensors)
    reduction = Reduction.of(op, packed.flat.dtype)
    if root is not None:
        _require_root(comm, root)
    receives = root in (None, comm.rank)

    def steps(comm: Communicator, call: Call, mark: int) -> Steps:
        return reduce(comm, call, mark, reduction, packed.flat, root)

    name = "all_reduce" if root is None else f"reduce to rank {root}"
    text = f"{name} ({reduction.name}) of {packed.flat.numel()} {_named(packed.flat.dtype)}"
    return Operation(text, steps, tensors, [packed] if receives else [], agrees=True)


def broadcast(comm: Communicator, tensors: Sequence[Tensor], root: int) -> Operation:
    """Overwrite tensors with the root's."""
    require_dense(tensors, one_dtype=False)
    _require_root(comm, root)
    packed = Packed(tensors, filled=comm.rank == root)

    def steps(comm: Communicator, call: Call) -> Steps:
        return movement.broadcast(comm, call, packed.bytes, root)

    text = f"broadcast from rank {root} of {packed.flat.numel()} {_named(packed.flat.dtype)}"
    return Operation(text, steps, tensors, [packed] if comm.rank != root else [])


def all_gather(comm: Communicator, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Operation:
    """Every rank's inputs, on every rank; `outputs[r]` are overwritten with those of rank r, whose sizes may differ."""
    everything = [tensor for one in outputs for tensor in one]
    require_dense([*everything, *inputs], one_dtype=False)
    require(len(outputs) == comm.size, f"there are {len(outputs)} outputs for {comm.size} ranks")
    received = Packed(everything, filled=False)
    sent = Packed(inputs).apart_from(received)
    sizes = [_nbytes(one) for one in outputs]
    mine = sum(sent.sizes)
    require(
        mine == sizes[comm.rank],
        f"the input has {mine} bytes, and the output of this rank, {sizes[comm.rank]}: make them alike",
    )
    exchange = Exchange("Iallgatherv", Side(sent.bytes), Side(received.bytes, sizes), sum(sizes))
    text = f"all_gather of {_counted(sizes)} bytes of {_named(sent.flat.dtype)}"
    return Operation(text, exchange.steps, everything, [received])


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _counted(sizes: Sequence[int]) -> str:
    """Sizes in words, short where they are alike."""
    return f"{len(sizes)} times {sizes[0]}" if len(set(sizes)) == 1 else str(list(sizes))


def all_gather_single(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Every rank's inputs, each in one tensor for all ranks."""
    require_dense([*outputs, *inputs], one_dtype=False)
    _pair(outputs, inputs)
    for one, other in zip(outputs, inputs, strict=True):
        require(
            one.dtype == other.dtype and one.numel() == other.numel() * comm.size,
            f"the output has {one.numel()} {one.dtype}, and the input {other.numel()} {other.dtype}: the output must "
            f"be {comm.size} times as large",
        )
    cut = [rows(tensor, comm.size) for tensor in outputs]
    return all_gather(comm, [[one[rank] for one in cut] for rank in range(comm.size)], inputs)._replace(result=outputs)


def _pair(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    require(len(outputs) == len(inputs), f"there are {len(outputs)} outputs for {len(inputs)} inputs")


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

    text = f"reduce_scatter ({reduction.name}) of {_counted(counts)} {_named(received.flat.dtype)}"
    return Operation(text, steps, outputs, [received])


def scatter_reduced_single(
    comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: Any
) -> Operation:
    """Reduce one tensor of all ranks, or several, each rank getting an equal part of each."""
    require_dense([*outputs, *inputs])
    _pair(outputs, inputs)
    for one, other in zip(outputs, inputs, strict=True):
        require(
            one.numel() * comm.size == other.numel(),
            f"the input has {other.numel()} elements, and the output {one.numel()}: the input must be {comm.size} "
            "times as large",
        )
    cut = [rows(tensor, comm.size) for tensor in inputs]
    return scatter_reduced(comm, outputs, [[one[rank] for one in cut] for rank in range(comm.size)], op)


def all_to_all(
    comm: Communicator,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    even: bool,
) -> Operation:
    """Send a part to every rank and receive one of each; sizes are bytes, `even`: the same number for all ranks."""
    require_dense([*outputs, *inputs])
    received = Packed(outputs, filled=False)
    sent = Packed(inputs).apart_from(received)
    most = max(sum(received_sizes), sum(sent_sizes))

    def steps(comm: Communicator, call: Call) -> Steps:
        largest = most
        if not even:
            largest = yield from movement.agree_on_sizes(comm, call, sent_sizes, received_sizes)
        sides = Side(sent.bytes, sent_sizes), Side(received.bytes, received_sizes)
        yield from Exchange("Ialltoallv", *sides, largest).steps(comm, call)

    what = f"{_counted(sent_sizes)} bytes of " if even else "split sizes in "
    return Operation(f"all_to_all of {what}{_named(sent.flat.dtype)}", steps, outputs, [received])


def all_to_all_lists(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Send a tensor to every rank and receive one of each."""
    require_dense([*outputs, *inputs])
    require(
        len(outputs) == len(inputs) == comm.size,
        f"there are {len(outputs)} outputs and {len(inputs)} inputs for {comm.size} ranks",
    )
    received, sent = ([_nbytes([tensor]) for tensor in tensors] for tensors in (outputs, inputs))
    return all_to_all(comm, outputs, inputs, received, sent, even=False)


def all_to_all_single(
    comm: Communicator, output: Tensor, input_: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> Operation:
    """Send a part of a tensor along its first dimension to every rank, and receive one of each; no splits: equal."""
    require_dense([output, input_])
    received_sizes = split_along_first(output, output_splits, comm.size)
    sent_sizes = split_along_first(input_, input_splits, comm.size)
    even = not output_splits and not input_splits
    if even:
        require(
            received_sizes == sent_sizes,
            f"the input has {input_.numel()} elements and the output {output.numel()}: make them alike, or pass split "
            "sizes",
        )
    return all_to_all(comm, [output], [input_], received_sizes, sent_sizes, even)


def gather(comm: Communicator, outputs: Sequence[Tensor], input_: Tensor, root: int) -> Operation:
    """Every rank's tensor, on the root, in `outputs`; other ranks have none."""
    everything = _of_all_ranks(comm, outputs, input_, root)
    mine = Packed([input_])
    if everything is not None:
        mine = mine.apart_from(everything)
    sides = Side(mine.bytes), _in_parts(comm, everything)
    exchange = Exchange("Igatherv", *sides, _nbytes([input_]) * comm.size, root)
    return Operation(_with_root("gather", root, input_), exchange.steps, outputs, [everything] if everything else [])


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Operation:
    """A tensor for every rank, from the root's `inputs`; other ranks have none."""
    everything = _of_all_ranks(comm, inputs, output, root)
    mine = Packed([output], filled=False)
    if everything is not None:
        everything = everything.apart_from(mine)
    sides = _in_parts(comm, everything), Side(mine.bytes)
    exchange = Exchange("Iscatterv", *sides, _nbytes([output]) * comm.size, root)
    return Operation(_with_root("scatter", root, output), exchange.steps, [output], [mine])


def _of_all_ranks(comm: Communicator, tensors: Sequence[Tensor], own: Tensor, root: int) -> Packed | None:
    """The tensors of all ranks that the root passes, each as large as every rank's own; None on other ranks."""
    _require_root(comm, root)
    require_dense([*tensors, own])
    expected = comm.size if comm.rank == root else 0
    require(
        len(tensors) == expected,
        f"there are {len(tensors)} tensors of all ranks: the root passes {comm.size}, and other ranks none",
    )
    require(
        all(_nbytes([tensor]) == _nbytes([own]) for tensor in tensors),
        f"the tensors of all ranks have {[tensor.numel() for tensor in tensors]} elements, and this one "
        f"{own.numel()}: make them alike",
    )
    return Packed(tensors) if tensors else None


def _in_parts(comm: Communicator, everything: Packed | None) -> Side | None:
    return None if everything is None else Side(everything.bytes, everything.sizes)


def _with_root(name: str, root: int, own: Tensor) -> str:
    return f"{name} with root {root} of {own.numel()} {_named(own.dtype)}"


def barrier(comm: Communicator) -> Operation:
    """Wait for all ranks."""
    return Operation("barrier", movement.barrier)
