"""One rank under a CUDA-aware Open MPI, which averages arrays of a GPU, or of a fake device without a GPU."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from collectives import Communicator, Ring, arrays
from collectives.arrays.gpu_mpi import claims, verdict
from collectives.dense import device_sum
from mpicomp import Marsit
from mpicomp.reducers import sign_merge
from tests.fake_device import FakeArray, FakeDevice

N, N_SIGNS = 300_007, 50_007
DTYPES = ("float32", "float64", "float16", "bfloat16")


def main() -> None:
    """Print the library's claim, the probe's findings, and whether all sums and merged signs have the host's bits."""
    device_sum.STAGED_BYTES = sign_merge.DIRECT_BYTES = 0
    fake = FakeDevice()
    if not torch.cuda.is_available():
        arrays.MAKERS[arrays.CUDA] = lambda index: fake
    with Communicator(topology=Ring()) as comm:
        same = all(sums_are_the_hosts(comm, dtype, op) for dtype in DTYPES for op in ("sum", "mean", "min"))
        same = signs_are_the_hosts(comm) and same
        outcome = verdict.verdict.outcome
        assert outcome is not None
        about = {"aware": claims.are_positive(claims.claims()), "works": outcome.works, "said": outcome.said}
        everyone = comm.allgather_object(about | {"same": same})
        if comm.rank == 0:
            json.dump(everyone, sys.stdout)


def sums_are_the_hosts(comm: Communicator, dtype: str, op: Any) -> bool:
    """Return whether arrays on devices have the sum of the same arrays in the host's memory."""
    x = torch.from_numpy(np.random.default_rng(comm.rank).standard_normal(N)).to(getattr(torch, dtype))
    expected = comm.allreduce(x, op).view(torch.uint8)
    if torch.cuda.is_available():
        return torch.equal(comm.allreduce(x.cuda(), op).cpu().view(torch.uint8), expected)
    words = x.view(torch.uint16).numpy() if dtype == "bfloat16" else x.numpy()
    return bool((comm.allreduce(FakeArray(words, dtype), op).there.view(np.uint8) == expected.numpy()).all())


def signs_are_the_hosts(comm: Communicator) -> bool:
    """Return whether Marsit on a device has the results of Marsit in the host's memory, and merges signs there."""
    method = Marsit(full_precision_every=None, global_step=0.1)
    here, there = (method.start(comm, N_SIGNS, device=device) for device in ("cpu", "cuda"))
    outcome = verdict.verdict.outcome
    same = isinstance(there.reducer.bits, np.ndarray) != (outcome is not None and outcome.works)
    for step in range(3):
        x = np.random.default_rng((comm.rank, step)).standard_normal(N_SIGNS).astype(np.float32)
        given: Any = torch.from_numpy(x).cuda() if torch.cuda.is_available() else FakeArray(x)
        found = there.aggregate(given)
        found = found.cpu().numpy() if torch.cuda.is_available() else found.there
        same = same and np.array_equal(found, here.aggregate(x))
    return same


if __name__ == "__main__":
    main()
