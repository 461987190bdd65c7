"""The calls that `torch.distributed` makes of a process group, by the names and arguments that it has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from collectives import Communicator
from collectives.compiling import keep_methods_uncompiled
from mpicomp.torch.process_group import moving, reducing, sparse
from mpicomp.torch.process_group.calls import Calls
from mpicomp.torch.process_group.operation import Operation, require
from mpicomp.torch.process_group.work import Work

SHORTEST = timedelta(milliseconds=1)  # c10d means no timeout of its own by none at all


class _Timed(NamedTuple):
    """Options of a call that has nothing but a timeout."""

    timeout: timedelta


@keep_methods_uncompiled
class Methods:
    """What a process group does; tensors come in lists, as C++ passes them, or alone.

    Several names are one call: PyTorch has renamed some, and passes several tensors under another name.
    """

    _calls: Calls

    def _start_coalescing(self, device: object) -> None:
        """Collect the works that follow."""
        self._calls.start_coalescing()

    def _end_coalescing(self, device: object) -> Work:
        """All works since, as one."""
        return self._calls.end_coalescing()

    # Collectives -----------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0) -> Work:
        """Overwrite a tensor with the root's."""
        operation = _taking(moving.broadcast, _single)
        source, options = _root(opts, root), _timed(opts, timeout)
        return self._calls.collective("broadcast", operation, _list(tensors), source, opts=options, source=source)

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, op: Any = ReduceOp.SUM
    ) -> Work:
        """Reduce a tensor in place."""
        operands, options = (_list(tensors), _op(opts, op)), _timed(opts, timeout)
        return self._calls.collective("all_reduce", _taking(_all_reduce, _single), *operands, opts=options)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce tensors in place."""
        operands = _list(tensors), _op(opts, ReduceOp.SUM)
        return self._calls.collective("all_reduce", _taking(_all_reduce, _some), *operands, opts=opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = ReduceOp.SUM, root: int = 0) -> Work:
        """Reduce a tensor in place, on the root."""
        operands = _list(tensors), _op(opts, op), _root(opts, root)
        return self._calls.collective("reduce", _taking(reducing.reduce_to, _single), *operands, opts=opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Every rank's tensor, in a list of tensors."""
        operation = _taking(moving.all_gather, _lists_of_all_ranks, _single)
        return self._calls.collective("all_gather", operation, outputs, _list(inputs), opts=opts)

    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any = None) -> Work:
        """Every rank's tensors, in a list of tensors for each rank."""
        operation = _taking(moving.all_gather, list, _some)
        return self._calls.collective("all_gather", operation, outputs, _list(inputs), opts=opts)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Every rank's tensor, or tensors, each in one tensor for all ranks."""
        operands = _list(output), _list(input)
        return self._calls.collective("all_gather", moving.all_gather_single, *operands, opts=opts)

    _allgather_base = all_gather_single_coalesced = allgather_into_tensor_coalesced = all_gather_single

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, op: Any = ReduceOp.SUM) -> Work:
        """Reduce a list of tensors, each rank getting one."""
        operation = _taking(reducing.scatter_reduced, _single, _lists_of_all_ranks)
        return self._calls.collective("reduce_scatter", operation, _list(outputs), inputs, _op(opts, op), opts=opts)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Work:
        """Reduce a tensor, or tensors, each rank getting a part of each."""
        operands = _list(output), _list(input), _op(opts, ReduceOp.SUM)
        return self._calls.collective("reduce_scatter", reducing.scatter_reduced_single, *operands, opts=opts)

    _reduce_scatter_base = reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Send a tensor to every rank and receive one of each."""
        return self._calls.collective("all_to_all", moving.all_to_all_lists, outputs, inputs, opts=opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> Work:
        """Send a part of a tensor to every rank and receive one of each."""
        splits = output_split_sizes or [], input_split_sizes or []
        return self._calls.collective("all_to_all", moving.all_to_all_single, output, input, *splits, opts=opts)

    alltoall_base = all_to_all_single

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> Work:
        """Every rank's tensor, on the root."""
        operation = _taking(moving.gather, _of_all_ranks, _only)
        return self._calls.collective("gather", operation, outputs, _list(inputs), _root(opts, root), opts=opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, root: int = 0) -> Work:
        """A tensor for every rank, from the root."""
        operation = _taking(moving.scatter, _only, _of_all_ranks)
        return self._calls.collective("scatter", operation, _list(outputs), inputs, _root(opts, root), opts=opts)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Wait for all ranks."""
        return self._calls.collective("barrier", moving.barrier, opts=_timed(opts, timeout))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names all that do not come."""
        self.barrier(timeout=timeout).wait()

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Work:
        """Send a tensor to a rank."""
        return self._calls.message("send", self._calls.messages.send, _list(tensors), dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._calls.message("receive", self._calls.messages.receive, _list(tensors), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receive a tensor from whichever rank sends one."""
        return self._calls.message("receive", self._calls.messages.receive, _list(tensors), None, tag)


def _list(tensors: Any) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _op(opts: Any, op: Any) -> Any:
    return opts if isinstance(opts, ReduceOp | ReduceOp.RedOpType) else getattr(opts, "reduceOp", op)


def _taking(operation: Callable[..., Operation], *takers: Callable[[Any], Any]) -> Callable[..., Operation]:
    """The operation of what `takers` make of its first operands; they raise ValueError as it does."""

    def taken(comm: Communicator, *operands: Any) -> Operation:
        first = [take(one) for take, one in zip(takers, operands, strict=False)]
        return operation(comm, *first, *operands[len(takers) :])

    return taken


def _some(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    require(len(tensors) > 0, "the list of tensors is empty: pass one tensor or more")
    return tensors


def _only(tensors: Sequence[Tensor]) -> Tensor:
    """The tensor of a list of one: C++ has lists, of the times when a process had several devices."""
    require(
        len(_some(tensors)) == 1,
        f"the list has {len(tensors)} tensors, and the call is of one: begin a call for each, or a coalesced one",
    )
    return tensors[0]


def _single(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [_only(tensors)]


def _of_all_ranks(tensors: Any) -> Sequence[Tensor]:
    """A list of tensors, or the only one of a list of lists."""
    if not tensors or not isinstance(tensors[0], Sequence):
        return tensors  # type: ignore[no-any-return]
    require(len(tensors) == 1, f"there are {len(tensors)} lists of tensors, and the call is of one")
    return tensors[0]


def _lists_of_all_ranks(tensors: Any) -> list[list[Tensor]]:
    return [[tensor] for tensor in _of_all_ranks(tensors)]


def _all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: Any) -> Operation:
    is_sparse = any(isinstance(one, Tensor) and one.layout == torch.sparse_coo for one in tensors)
    return (sparse.all_reduce if is_sparse else reducing.all_reduce)(comm, tensors, op)


def _root(opts: Any, root: int) -> int:
    return opts if isinstance(opts, int) else getattr(opts, "rootRank", root)


def _timed(opts: Any, timeout: timedelta | None) -> Any:
    return opts if timeout is None else _Timed(max(timeout, SHORTEST))
