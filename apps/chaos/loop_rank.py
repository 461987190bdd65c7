"""One rank of a user's training loop: ``python -m apps.chaos.loop_rank KIND SECONDS FOLDER``.

It writes a line of JSON after each step, with a checksum of its model: a killed rank leaves the lines up to its death.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # the first optimizer would load it, in each rank, within seconds in which ranks are killed
from mpi4py import MPI

import mpicomp
from apps.chaos.lines import Lines
from mpicomp.algorithms import Algorithm
from mpicomp.torch import DistributedOptimizer, OneBitAdam, ddp_hook, register_backend

N, TIMEOUT_S = 20_000, 120.0
Step = Callable[[], bytes]
"""Makes a step and returns the bytes of this rank's model."""
Loop = Callable[[mpicomp.Communicator, np.random.Generator], Step]


def numpy_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Average by Marsit, by hand."""
    return _loop_by_hand(mpicomp.Marsit(full_precision_every=7), comm, data)


def per_node_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Sum within nodes of two ranks, and send top-k between them."""
    return _loop_by_hand(mpicomp.PerNode(mpicomp.LocalTopK(rate=10)), comm, data)


def _loop_by_hand(method: Algorithm, comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    aggregator = method.start(comm, N)
    model = np.zeros(N, np.float32)

    def step() -> bytes:
        np.subtract(model, aggregator.aggregate(data.standard_normal(N, np.float32)), out=model)
        return model.tobytes()

    return step


def _network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def _torch_step(
    model: torch.nn.Module, forward: torch.nn.Module, optimizer: torch.optim.Optimizer, data: np.random.Generator,
    common: Callable[[], object] = lambda: None,
) -> Step:  # fmt: skip
    def step() -> bytes:
        inputs = torch.from_numpy(data.standard_normal((16, 64), np.float32))
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        optimizer.step()
        common()
        return b"".join(one.detach().numpy().tobytes() for one in model.parameters())

    return step


def optimizer_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Step a DistributedOptimizer."""
    model = _network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return _torch_step(model, model, DistributedOptimizer(inner, mpicomp.QSGD(), comm, model.named_parameters()), data)


def islands_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Make local steps on islands of two ranks, and average between these at the end of each step."""
    model = _network()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(
        inner, mpicomp.Marsit(), comm, model.named_parameters(), local_steps=3, islands=comm.nodes.local
    )
    return _torch_step(model, model, optimizer, data, optimizer.synchronize)


def one_bit_adam_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Step a OneBitAdam, whose first steps are of full precision."""
    model = _network()
    return _torch_step(model, model, OneBitAdam(model.named_parameters(), lr=1e-3, comm=comm, warmup_steps=10), data)


def ddp_loop(comm: mpicomp.Communicator, data: np.random.Generator) -> Step:
    """Train under DistributedDataParallel with a hook; its own process group is Gloo's."""
    register_backend()
    torch.distributed.init_process_group("gloo")
    model = _network()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel.register_comm_hook(*ddp_hook(mpicomp.QSGD(), comm, parallel))
    step = _torch_step(model, parallel, torch.optim.SGD(model.parameters(), lr=0.01), data)
    step(), step()  # a death before DDP has formed its buckets over Gloo's group ends the job
    return step


LOOPS: dict[str, Loop] = {
    "numpy": numpy_loop,
    "optimizer": optimizer_loop,
    "ddp": ddp_loop,
    "per-node": per_node_loop,
    "islands": islands_loop,
    "one-bit-adam": one_bit_adam_loop,
}
OF_NODES = ("per-node", "islands")


def run(kind: str, seconds: float, folder: Path) -> None:
    """Make steps for so many seconds."""
    torch.set_num_threads(1)
    number = MPI.COMM_WORLD.rank
    lines = Lines(folder / f"rank-{number}.jsonl")
    comm = mpicomp.Communicator(
        on_failure="regroup", timeout=TIMEOUT_S, arrival_timeout=TIMEOUT_S,
        ranks_per_node=2 if kind in OF_NODES else None,
    )  # fmt: skip
    if kind != "ddp":  # whose group of Gloo ends by an error if a rank dies while it is made
        lines.write("start", pid=os.getpid())
    step, end = LOOPS[kind](comm, np.random.default_rng([7, number])), time.monotonic() + seconds
    if kind == "ddp":
        lines.write("start", pid=os.getpid())
    bit = np.array([2.0**number])
    while comm.allreduce(float(time.monotonic() < end), "max"):
        before = comm.members
        in_sum = int(comm.allreduce(bit)[0])
        lines.write("step", members=comm.members, before=before, in_sum=in_sum, digest=zlib.crc32(step()))
    lines.write("end", members=comm.members)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    run(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
