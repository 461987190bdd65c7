"""One rank of a training under churn: ``python -m apps.chaos.churn_rank REQUEST.json``.

It trains until it is ended, and writes a line for each step. With spares, the last ranks of the job wait.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional as F  # noqa: N812

import mpicomp
from apps.chaos.churn_checkpoint import read_checkpoint, write_checkpoint
from apps.chaos.lines import Lines
from apps.records import Record, read_record
from apps.train.models import build
from collectives import Communicator
from collectives.recovery.newcomers import newcomers_of
from mpicomp.torch import DistributedOptimizer

TIMEOUT_S = 120.0
MOMENTUM = 0.9


class ChurnTraining:
    """Image classifier, its optimizer and its data on one rank, from a request of `Training.request`."""

    def __init__(self, request: Record, comm: Communicator) -> None:
        torch.manual_seed(request["seed"])
        folder = Path(request["data"])
        self._images, self._labels = (
            torch.from_numpy(np.load(folder / name, mmap_mode="c")) for name in ("images.npy", "labels.npy")
        )
        self._seed, self._batch, self._ranks = request["seed"], request["batch"], request["ranks"]
        n_classes = int(self._labels.max()) + 1
        channels, height, width = self._images.shape[1:]
        self.model = build(request["model"], (channels, height, width), n_classes, None, request["width"])
        sgd = torch.optim.SGD(self.model.parameters(), lr=request["learning_rate"], momentum=MOMENTUM)
        algorithm = mpicomp.algorithm(request["method"], **request["options"])
        self.optimizer = DistributedOptimizer(sgd, algorithm, comm, self.model.named_parameters(), "gradients")
        self.comm, self.step = comm, 0
        self._checkpoints = Path(request["checkpoints"])
        self._signs: list[torch.Tensor] = []

    def backward(self) -> float:
        """Compute the gradients of this rank's part of the batch; returns the loss."""
        draw = np.random.Generator(np.random.Philox(key=[self._seed, self.step]))
        dealt = draw.integers(0, len(self._labels), (self._ranks, self._batch))
        mine = torch.from_numpy(dealt[self.comm.rank])
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self._images[mine]), self._labels[mine])
        torch.autograd.backward(loss)
        return float(loss.detach())

    def write_checkpoint(self) -> None:
        """Write the model's and the optimizer's state, unless a rank dies meanwhile; collective."""
        states = self.model.state_dict(), self.optimizer.state_dict()
        write_checkpoint(self._checkpoints, self.comm, self.step, states)

    @property
    def digest(self) -> int:
        """Checksum of the model."""
        crc = 0
        for parameter in self.model.parameters():
            crc = zlib.crc32(parameter.detach().numpy().data, crc)
        return crc

    def project_gradients(self) -> float:
        """Return the gradients times a random vector of signs, in double precision."""
        named = dict(self.model.named_parameters())
        gradients = []
        for names in self.optimizer.buckets:
            parts = [named[name].grad for name in names]
            gradients.append(torch.cat([part.flatten() for part in parts if part is not None]))
        return self._project(gradients)

    def project_residuals(self) -> tuple[float, float]:
        """Return the residuals times the same vector, and the sum of their magnitudes."""
        residuals = []
        for aggregator in self.optimizer.aggregators:
            residual = aggregator.residual
            empty = residual is None or not residual.size
            residuals.append(torch.zeros(0) if empty else torch.as_tensor(residual))
        size = sum(float(one.abs().sum(dtype=torch.float64)) for one in residuals)
        return self._project(residuals), size

    def _project(self, vectors: list[torch.Tensor]) -> float:
        if len(self._signs) != len(vectors):
            draw = torch.Generator().manual_seed(self._seed)
            lengths = [aggregator.n for aggregator in self.optimizer.aggregators]
            self._signs = [torch.randint(0, 2, (n,), generator=draw).double() * 2 - 1 for n in lengths]
        pairs = zip(self._signs, vectors, strict=True)
        return sum(float(signs @ vector.double()) for signs, vector in pairs if len(vector))


def train(request: Record, lines: Lines) -> None:
    """Train until this rank is ended, or until the job needs more ranks than it has."""
    ranks, regroups = request["ranks"], request["on_failure"] == "regroup"
    comm = Communicator(timeout=TIMEOUT_S, on_failure=request["on_failure"], spares=request["spares"])
    training = ChurnTraining(request, comm)
    optimizer = training.optimizer
    is_spare = MPI.COMM_WORLD.rank >= ranks

    def restored(kind: str) -> None:
        projection, size = training.project_residuals()
        lines.write(kind, step=training.step, digest=training.digest, residual=projection, size=size)

    def load(saved: int) -> None:
        training.step = saved

    if not is_spare and request["checkpoint"] is not None:
        model, state, training.step = read_checkpoint(Path(request["checkpoint"]), comm.rank, comm.size)
        training.model.load_state_dict(model)
        optimizer.load_state_dict(state)
        restored("restored")
    lines.write("ready")
    while True:
        if regroups:
            joined = optimizer.admit(training.model, lambda: training.step, load)
            if joined and is_spare:
                is_spare = False
                restored("joined")
            assert newcomers_of(comm) is not None or not request["spares"]
            waiting = 0 if (newcomers := newcomers_of(comm)) is None else newcomers.waiting
            # agreed on, since a rank may notice a death one call later than another
            if comm.allreduce(int(comm.size < ranks and not waiting), "max"):
                training.write_checkpoint()
                lines.write("short", step=training.step)
                comm.close()
                return
        loss = training.backward()
        vector: float | None = None
        if optimizer.aggregators:  # they are made in the first step
            vector = training.project_gradients()
        optimizer.step()
        residual, size = training.project_residuals()
        lines.write(
            "step", step=training.step, members=comm.members, digest=training.digest, loss=loss, vector=vector,
            result=training.project_gradients(), residual=residual, size=size,
        )  # fmt: skip
        training.step += 1
        if request["checkpoint_every"] and training.step % request["checkpoint_every"] == 0:
            start = time.monotonic()
            training.write_checkpoint()
            lines.write("saved", step=training.step, seconds=time.monotonic() - start)


def main() -> None:
    """Run one rank."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the watchdog's request for stacks
    torch.set_num_threads(1)
    request: dict[str, Any] = read_record(Path(sys.argv[1]))
    lines = Lines(Path(sys.argv[1]).parent / f"rank-{MPI.COMM_WORLD.rank}.jsonl")
    lines.write("start", pid=os.getpid())
    train(request, lines)


if __name__ == "__main__":
    main()
