"""The collectives of `torch.distributed` that move tensors; they raise TypeError or ValueError."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from collectives import Communicator
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group import movement
from mpicomp.torch.process_group.movement import Exchange, Side
from mpicomp.torch.process_group.operation import (
    Operation,
    counted,
    named_dtype,
    nbytes_of,
    require,
    require_dense,
    require_pairs,
    require_root,
)
from mpicomp.torch.process_group.packed import Packed, rows, split_along_first


def broadcast(comm: Communicator, tensors: Sequence[Tensor], root: int) -> Operation:
    """Overwrite tensors with the root's."""
    require_dense(tensors, one_dtype=False)
    require_root(comm, root)
    packed = Packed(tensors, filled=comm.rank == root)

    def steps(comm: Communicator, call: Call) -> Steps:
        return movement.broadcast(comm, call, packed.bytes, root)

    text = f"broadcast from rank {root} of {packed.flat.numel()} {named_dtype(packed.flat.dtype)}"
    return Operation(text, steps, tensors, [packed] if comm.rank != root else [])


def all_gather(comm: Communicator, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Operation:
    """Every rank's inputs, on every rank; `outputs[r]` are overwritten with those of rank r, whose sizes may differ."""
    everything = [tensor for one in outputs for tensor in one]
    require_dense([*everything, *inputs], one_dtype=False)
    require(len(outputs) == comm.size, f"there are {len(outputs)} outputs for {comm.size} ranks")
    received = Packed(everything, filled=False)
    sent = Packed(inputs).apart_from(received)
    sizes = [nbytes_of(one) for one in outputs]
    mine = sum(sent.sizes)
    require(
        mine == sizes[comm.rank],
        f"the input has {mine} bytes, and the output of this rank, {sizes[comm.rank]}: make them alike",
    )
    exchange = Exchange("Iallgatherv", Side(sent.bytes), Side(received.bytes, sizes), sum(sizes))
    text = f"all_gather of {counted(sizes)} bytes of {named_dtype(sent.flat.dtype)}"
    return Operation(text, exchange.steps, everything, [received])


def all_gather_single(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Every rank's inputs, each in one tensor for all ranks."""
    require_dense([*outputs, *inputs], one_dtype=False)
    require_pairs(outputs, inputs)
    for one, other in zip(outputs, inputs, strict=True):
        require(
            one.dtype == other.dtype and one.numel() == other.numel() * comm.size,
            f"the output has {one.numel()} {one.dtype}, and the input {other.numel()} {other.dtype}: the output must "
            f"be {comm.size} times as large",
        )
    cut = [rows(tensor, comm.size) for tensor in outputs]
    return all_gather(comm, [[one[rank] for one in cut] for rank in range(comm.size)], inputs)._replace(result=outputs)


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

    what = f"{counted(sent_sizes)} bytes of " if even else "split sizes in "
    return Operation(f"all_to_all of {what}{named_dtype(sent.flat.dtype)}", steps, outputs, [received])


def all_to_all_lists(comm: Communicator, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Operation:
    """Send a tensor to every rank and receive one of each."""
    require_dense([*outputs, *inputs])
    require(
        len(outputs) == len(inputs) == comm.size,
        f"there are {len(outputs)} outputs and {len(inputs)} inputs for {comm.size} ranks",
    )
    received, sent = ([nbytes_of([tensor]) for tensor in tensors] for tensors in (outputs, inputs))
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
    exchange = Exchange("Igatherv", *sides, nbytes_of([input_]) * comm.size, root)
    return Operation(_with_root("gather", root, input_), exchange.steps, outputs, [everything] if everything else [])


def scatter(comm: Communicator, output: Tensor, inputs: Sequence[Tensor], root: int) -> Operation:
    """A tensor for every rank, from the root's `inputs`; other ranks have none."""
    everything = _of_all_ranks(comm, inputs, output, root)
    mine = Packed([output], filled=False)
    if everything is not None:
        everything = everything.apart_from(mine)
    sides = _in_parts(comm, everything), Side(mine.bytes)
    exchange = Exchange("Iscatterv", *sides, nbytes_of([output]) * comm.size, root)
    return Operation(_with_root("scatter", root, output), exchange.steps, [output], [mine])


def _of_all_ranks(comm: Communicator, tensors: Sequence[Tensor], own: Tensor, root: int) -> Packed | None:
    """The tensors of all ranks that the root passes, each as large as every rank's own; None on other ranks."""
    require_root(comm, root)
    require_dense([*tensors, own])
    expected = comm.size if comm.rank == root else 0
    require(
        len(tensors) == expected,
        f"there are {len(tensors)} tensors of all ranks: the root passes {comm.size}, and other ranks none",
    )
    require(
        all(nbytes_of([tensor]) == nbytes_of([own]) for tensor in tensors),
        f"the tensors of all ranks have {[tensor.numel() for tensor in tensors]} elements, and this one "
        f"{own.numel()}: make them alike",
    )
    return Packed(tensors) if tensors else None


def _in_parts(comm: Communicator, everything: Packed | None) -> Side | None:
    return None if everything is None else Side(everything.bytes, everything.sizes)


def _with_root(name: str, root: int, own: Tensor) -> str:
    return f"{name} with root {root} of {own.numel()} {named_dtype(own.dtype)}"


def barrier(comm: Communicator) -> Operation:
    """Wait for all ranks."""
    return Operation("barrier", movement.barrier)
