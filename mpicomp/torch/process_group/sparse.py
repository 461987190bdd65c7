"""Sums of sparse tensors, such as gradients of embeddings: every rank gets all entries, and adds those of one place."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.execution.handle import Call, Steps
from mpicomp.torch.process_group.movement import Exchange, Side
from mpicomp.torch.process_group.operation import Operation, require
from mpicomp.torch.process_group.packed import as_bytes
from mpicomp.torch.process_group.reduction import Reduction


def all_reduce(comm: Communicator, tensors: Sequence[Tensor], op: object) -> Operation:
    """Sum or mean of a tensor in COO layout, in place."""
    require(
        len(tensors) == 1, f"{len(tensors)} tensors, of which some are sparse, cannot be one call: pass them singly"
    )
    tensor = tensors[0]
    require(tensor.device.type == "cpu", f"the tensor is on {tensor.device}: pass tensor.cpu()")
    reduction = Reduction.of(op, tensor.dtype)
    require(reduction.name in ("SUM", "AVG"), f"{reduction.name} of sparse tensors is not supported: sum them")
    steps = partial(_steps, tensor=tensor, mean=reduction.mean)
    shape = f"{list(tensor.shape)}, {tensor.sparse_dim()} dimensions sparse"
    text = f"all_reduce ({reduction.name}) of sparse {tensor.dtype}{shape}"
    return Operation(text, steps, [tensor])


def _steps(comm: Communicator, call: Call, tensor: Tensor, mean: bool) -> Steps:
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    entries = np.empty(comm.size, np.int64)
    yield from comm.turn_of(call)
    request = comm.mpi_comm.Iallgather(np.array([indices.shape[1]], np.int64), entries)
    missing = f"{comm.here}: the ranks' numbers of entries are missing for {call.name()}"
    yield from comm.await_request(call, request, lambda: missing)
    places = yield from _gather(comm, call, indices.t().contiguous(), entries.tolist())
    everything = yield from _gather(comm, call, values.contiguous(), entries.tolist())
    total = torch.sparse_coo_tensor(places.t(), everything, tensor.shape).coalesce()
    with torch.no_grad():  # and into the tensor itself: one that is detached has entries of its own
        tensor.copy_(total / comm.size if mean else total)


def _gather(comm: Communicator, call: Call, rows: Tensor, entries: Sequence[int]) -> Generator[bool, None, Tensor]:
    """Rows of all ranks, of which each has so many."""
    everything = torch.empty(sum(entries), *rows.shape[1:], dtype=rows.dtype)
    row = everything[:1].numel() * everything.element_size()
    sizes = [count * row for count in entries]
    sides = Side(as_bytes(rows.view(-1))), Side(as_bytes(everything.view(-1)), sizes)
    yield from Exchange("Iallgatherv", *sides, sum(sizes)).steps(comm, call)
    return everything
