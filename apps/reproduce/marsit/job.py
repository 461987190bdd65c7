"""What runs on the ranks for Marsit's figures: bytes of full-precision rounds, and what a step's time goes into."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812

import mpicomp
from apps.records import Record
from apps.reproduce.marsit.methods import TIMED
from apps.train.models import build
from collectives import Communicator, Traffic
from mpicomp.cli.timing import gather, spin_barrier, turns

WARMING = 2  # calls that compile kernels and start from cold


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the request says; rank 0 writes what was found."""
    mpicomp.install_abort_hook()
    request = json.loads(Path((sys.argv[1:] if argv is None else argv)[0]).read_text())
    parts: dict[str, Callable[[Record], Record]] = {"bytes": count_bytes, "split": split_steps}
    found = parts[request["part"]](request)
    if found.pop("rank") == 0:
        Path(request["path"]).write_text(json.dumps(found))
    return 0


def count_bytes(request: Record) -> Record:
    """Bits per element and phase for each K."""
    with Communicator(topology="ring", timeout=300.0) as comm:
        return {"rank": comm.rank, "bits": bits_sent(comm, request["n"], request["steps"], request["periods"])}


def bits_sent(comm: Communicator, n: int, steps: int, periods: Sequence[int | None]) -> list[float]:
    """Per element and phase, mean over ranks and rounds; collective."""
    x = np.random.default_rng(comm.rank).standard_normal(n, np.float32)
    out, phases, bits = np.zeros_like(x), 2 * (comm.size - 1) / comm.size, []
    for period in periods:
        aggregator = mpicomp.Marsit(period).start(comm, n)
        for _ in range(steps):
            aggregator.aggregate(x, out)
        sent = gather(comm, np.array([float(aggregator.traffic.total.bytes_sent)])).mean()
        bits.append(float(8 * sent / (steps * n * phases)))
    return bits


def split_steps(request: Record) -> Record:
    """What a step's time goes into, by topology and method."""
    torch.set_num_threads(1)
    step, found = Step(request["hidden"], request["batch"]), {}
    for topology in request["topologies"]:
        with Communicator(topology=topology, timeout=300.0) as comm:
            rank, found[topology] = comm.rank, time_phases(comm, step, request["rounds"])
    return {"rank": rank, "n": step.n, "split": found}


def time_phases(comm: Communicator, step: Step, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds of each of a step's phases, a row a round; in each round every method has its turn. Collective.

    Returns
    -------
    dict
        By method, rows of ``[compute, encode, merge, decode, wait, other]``: mean over ranks.
    """
    started = {name: method.start(comm, step.n) for name, method in TIMED.items()}
    out = np.zeros(step.n, np.float32)
    own: dict[str, list[list[float]]] = {name: [] for name in started}
    for name in turns(dict.fromkeys(started, WARMING + rounds)):
        spin_barrier(comm)
        begun = time.perf_counter()
        gradient = step.gradient()
        computed = time.perf_counter() - begun
        started[name].aggregate(gradient, out)
        own[name].append([computed, *phases(started[name].traffic.last)])
    return {name: gather(comm, np.array(rows[WARMING:])).mean(axis=0).tolist() for name, rows in own.items()}


def phases(call: Traffic) -> list[float]:
    """Seconds of a call: encode, merge, decode, wait, and what is none of these."""
    known = [call.seconds_encoding, call.seconds_merging, call.seconds_decoding, call.seconds_waiting]
    return [*known, max(0.0, call.seconds_total - sum(known))]


class Step:
    """Forward and backward pass of a perceptron on images of noise.

    Attributes
    ----------
    n : int
        Elements of the gradient.
    """

    def __init__(self, hidden: int, batch: int) -> None:
        self._model = build("mlp", (1, 28, 28), 10, (hidden,), None)
        self._images, self._labels = torch.randn(batch, 1, 28, 28), torch.arange(batch) % 10
        self.n = sum(parameter.numel() for parameter in self._model.parameters())

    def gradient(self) -> NDArray[Any]:
        """As one vector."""
        self._model.zero_grad()
        F.cross_entropy(self._model(self._images), self._labels).backward()
        grads = [parameter.grad.reshape(-1) for parameter in self._model.parameters() if parameter.grad is not None]
        return torch.cat(grads).numpy()


if __name__ == "__main__":
    sys.exit(main())
