"""Making the ranks' models equal, and noticing when they are not."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from collectives import Communicator
from collectives.compiling import keep_uncompiled
from collectives.consistency.call_check import fingerprint
from mpicomp.torch.buckets import NamedParameter
from mpicomp.torch.devices import require_reachable

_BROADCAST_BYTES = 25 * 2**20


@keep_uncompiled
def broadcast_parameters(
    module_or_state_dict: torch.nn.Module | Mapping[str, Tensor], comm: Communicator | None = None, root: int = 0
) -> None:
    """Copy one rank's parameters and buffers to all ranks.

    Parameters
    ----------
    module_or_state_dict
        A module, or the tensors of one by name. Every tensor is **overwritten** on all ranks but `root`. Dense tensors
        of any dtype, on the CPU or a GPU, whichever on each rank; the bits are copied as they are.
    comm
        Communicator; None makes one on all ranks of the job and closes it again.
    root
        Rank whose values all take.

    Raises
    ------
    TypeError, ValueError
        An entry of this rank's is not a tensor, or on a device that cannot be reached; the others then raise
        CollectiveMismatch.
    CollectiveMismatch
        The ranks' tensors differ in name, shape or dtype.
    """
    if isinstance(module_or_state_dict, torch.nn.Module):
        module_or_state_dict = module_or_state_dict.state_dict()
    with Communicator() if comm is None else nullcontext(comm) as used:
        broadcast_tensors(module_or_state_dict, used, root, "broadcast_parameters")


@keep_uncompiled
@torch.no_grad()
def average_buffers(module: torch.nn.Module, comm: Communicator) -> None:
    """Replace a module's floating-point buffers by their mean over the ranks, densely.

    BatchNorm's running statistics are buffers, which each rank gathers from its own shard and no optimizer sees. Call
    this before evaluating or saving the model, and under Marsit with each full-precision round
    (``optimizer.synchronizations % full_precision_every == 1``), where the ranks' updates are averaged exactly too.
    Buffers of other dtypes, such as the number of batches seen, are not changed.

    Parameters
    ----------
    module
        Its floating-point buffers are **overwritten**.
    comm
        Communicator of the ranks that train the module.
    """
    buffers = [buffer for buffer in module.buffers() if buffer.is_floating_point() and buffer.numel()]
    if not buffers or comm.size == 1:
        return
    dtype = torch.float64 if any(buffer.dtype == torch.float64 for buffer in buffers) else torch.float32
    flat = torch.cat([buffer.reshape(-1).to(buffers[0].device, dtype) for buffer in buffers])
    parts = torch.split(comm.allreduce(flat, op="mean"), [buffer.numel() for buffer in buffers])
    for buffer, part in zip(buffers, parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def require_same_layout(named: Mapping[str, Tensor], comm: Communicator, on: str = "") -> None:
    """Raise CollectiveMismatch on every rank unless all have the same names, shapes and dtypes in the same order.

    on : where the tensors are, which must be the same words on all ranks.
    """
    layout = fingerprint("".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}, " for name, tensor in named.items()))
    n_elements = sum(tensor.numel() for tensor in named.values())
    tensors = f"{len(named)} tensors{on} of {n_elements} elements"
    comm.agree(
        fingerprint(f"{layout:x}{on}"),
        lambda: f"{tensors} whose names, shapes and dtypes have checksum {layout:x}",
    )


def require_alike(members: Sequence[NamedParameter], comm: Communicator) -> None:
    """Raise CollectiveMismatch unless the ranks' parameters are alike, and on one kind of device.

    A CPU rounds some steps of optimizers otherwise than a GPU does, and the ranks' models would drift apart.
    """
    kinds = sorted({member.parameter.device.type for member in members})
    named = {member.name: member.parameter for member in members}
    require_same_layout(named, comm, f" on {' and '.join(kinds)}")


def require_same_values(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """Raise CollectiveMismatch on every rank unless all hold the same bits."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(_bytes_of(tensor).numpy().data, crc)
    comm.agree(crc, lambda: f"parameters of checksum {crc:x}, which broadcast_parameters(model, comm) makes equal")


@torch.no_grad()
def broadcast_tensors(named: Mapping[str, Tensor], comm: Communicator, root: int, call: str) -> None:
    """Overwrite tensors in place by rank `root`'s. `call` is its name in messages; raises as `broadcast_parameters`."""
    try:
        if not isinstance(named, Mapping):
            raise TypeError(f"a {type(named).__name__} has no tensors by name; pass a module or its state_dict()")
        for name, tensor in named.items():
            if not torch.is_tensor(tensor):
                raise TypeError(f"{name!r} is a {type(tensor).__name__}, not a tensor; leave it out")
            require_reachable(f"parameter {name!r}", tensor)
            if tensor.layout != torch.strided:
                raise ValueError(f"{name!r} is a {tensor.layout} tensor; make it dense, or leave it out")
    except (TypeError, ValueError) as error:
        comm.reject(type(error)(f"{comm.here}, {call}: {error}"), call)
    require_same_layout(named, comm)
    batch: list[Tensor] = []
    nbytes = 0
    for tensor in named.values():
        batch.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= _BROADCAST_BYTES:
            _broadcast_batch(batch, comm, root)
            batch, nbytes = [], 0
    if batch:
        _broadcast_batch(batch, comm, root)


def _broadcast_batch(batch: Sequence[Tensor], comm: Communicator, root: int) -> None:
    flat = torch.cat([_bytes_of(tensor) for tensor in batch])
    received = torch.from_numpy(np.asarray(comm.broadcast(flat.numpy(), root=root)))
    parts = torch.split(received, [tensor.nbytes for tensor in batch])
    for tensor, part in zip(batch, parts, strict=True):
        # clone: a part may start at any byte, and a view of wider elements needs an aligned start
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Its memory, or a copy in the host's."""
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
