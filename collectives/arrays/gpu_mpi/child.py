"""Program of the probe's process: it sends memory of a GPU to itself by MPI, and may crash.

It runs as a file and imports nothing of this package. It prints one line, which begins with its verdict. It initializes
MPI before it touches the GPU, as programs do.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

WORKS, WRONG, NO_START = "works", "wrong", "no start"
SIZES = (1 << 10, 1 << 24)  # bytes: one message that is sent at once, and one that MPI shakes hands for
TAG = 7


def probe(device: str) -> str:
    """Send memory of a device such as ``"cuda:1"`` to itself, and to and from the host's memory, and compare it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"{NO_START}: MPI cannot be initialized: {error}"
    try:
        import torch
    except ImportError as error:
        return f"{NO_START}: PyTorch cannot be imported: {error}"
    is_gpu, index = device != "cpu", int(device.partition(":")[2] or 0)
    if is_gpu and index >= torch.cuda.device_count():
        return f"{NO_START}: PyTorch finds no GPU {index}"
    for nbytes in SIZES:
        there = torch.arange(nbytes, dtype=torch.int64, device=device).to(torch.uint8)
        here = there.cpu()
        for source, target in ((there, there), (there, here), (here, there)):
            landing = torch.zeros_like(target)
            if is_gpu:
                torch.cuda.synchronize(index)
            receive = MPI.COMM_SELF.Irecv(memory(MPI, landing), 0, TAG)
            MPI.COMM_SELF.Send(memory(MPI, source), 0, TAG)
            receive.Wait()
            if not torch.equal(landing.cpu(), here):
                return f"{WRONG}: {nbytes} bytes from {source.device} to {target.device} did not arrive as they were"
    return f"{WORKS}: messages of up to {SIZES[-1]} bytes from and to {device}"


def memory(mpi: ModuleType, tensor: Any) -> list[object]:
    """Return the memory of a tensor as mpi4py hands it to MPI, by its address alone."""
    return [mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes, mpi.BYTE]


if __name__ == "__main__":
    print(probe(sys.argv[1]), flush=True)
