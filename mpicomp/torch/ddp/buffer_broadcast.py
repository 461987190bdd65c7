"""Copies of a model's buffers from the first rank that is alive, in place of DistributedDataParallel's broadcast."""

from __future__ import annotations

import torch
from torch import Tensor

from collectives import Communicator
from collectives.arrays.tensor_bytes import tensor_bytes
from collectives.execution.uncompiled import keep_uncompiled

_WORD_BYTES = 4


class BufferBroadcast:
    """Overwrites a model's buffers by those of rank 0, over a communicator whose ranks may die.

    A broadcast has a root, which may be dead when the survivors repeat the call. So the ranks sum instead: rank 0 gives
    the bits of its buffers as integers and a one, and the others zeros. Without the one the root has died, and they
    sum again. All of them decide by the same sum.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    @keep_uncompiled
    @torch.no_grad()
    def run(self, named: dict[str, Tensor]) -> None:
        """Overwrite the buffers: the hook that DDP calls before each forward."""
        buffers = [buffer for buffer in named.values() if buffer.numel()]
        if not buffers or self._comm.size == 1:
            return
        sizes = [-(-buffer.nbytes // _WORD_BYTES) * _WORD_BYTES for buffer in buffers]
        own = torch.zeros(sum(sizes) + _WORD_BYTES, dtype=torch.uint8, device="cpu")
        for part, buffer in zip(torch.split(own, [*sizes, _WORD_BYTES]), buffers, strict=False):
            part[: buffer.nbytes] = tensor_bytes(buffer).cpu()
        words = own.view(torch.int32)
        words[-1] = 1
        found = self._sum_of_root(words)
        while not found[-1]:
            found = self._sum_of_root(words)
        for part, buffer in zip(torch.split(found[:-1].view(torch.uint8), sizes), buffers, strict=True):
            # clone: a view of wider elements needs an aligned start
            buffer.copy_(part[: buffer.nbytes].clone().view(buffer.dtype).view(buffer.shape))

    def _sum_of_root(self, words: Tensor) -> Tensor:
        return self._comm.allreduce(words if self._comm.rank == 0 else torch.zeros_like(words))
