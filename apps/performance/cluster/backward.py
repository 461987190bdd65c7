"""How much of the communication of a training step is hidden behind backward.

*Backward* is that of the model alone. *Communication* is what averages the gradients of all buckets, one after the
other, when backward is over. *Both* is backward with the buckets begun from its hooks, until the last mean is there.
All take turns. The size of the batch sets how long backward takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

import mpicomp
from apps.environment import describe, environment
from apps.performance.cluster.driver import FAILURES, log, measure_alone
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.tables import NOTHING
from apps.performance.part import MS, get, in_unit, table
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import gather, spin_barrier

N, LAYERS, REPEATS = 25_000_000, 12, 9
CLUSTER = Cluster(2, "1gbit")
FACTORS = (0.5, 1.0, 2.0)
"""Of backward in units of communication."""
MOST_OVER = 1.2
METHODS: dict[str, Algorithm] = {
    "dense": mpicomp.Dense(),
    "Marsit": mpicomp.Marsit(None),
    "DoubleSqueeze": mpicomp.DoubleSqueeze(),
}
FIRST_BATCH, LONGEST_BATCH = 16, 4096


def measure_here(comm: Communicator, n: int, repeats: int) -> Record:
    """Time the methods with batches that make backward as long as `FACTORS` times their communication; collective."""
    import torch  # which other jobs can do without

    torch.set_num_threads(1)
    rows = []
    for name, method in METHODS.items():
        early, late = (Step(comm, method, n, overlap) for overlap in (True, False))
        for step in (early, late):
            step.run(FIRST_BATCH)  # lays out the buckets
        communication_s = _median(comm, lambda step=late: step.run(FIRST_BATCH)[1], 3)
        each_s = _median(comm, lambda step=late: step.run(FIRST_BATCH)[0], 3) / FIRST_BATCH
        for factor in FACTORS:
            batch = int(min(LONGEST_BATCH, max(1, round(factor * communication_s / each_s))))
            both: list[float] = []
            backward: list[float] = []
            communication: list[float] = []
            for _ in range(repeats):
                both.append(sum(early.run(batch)))
                apart = late.run(batch)
                backward.append(apart[0])
                communication.append(apart[1])
            seconds = gather(comm, np.array([both, backward, communication])).max(axis=0)
            medians = np.median(seconds, axis=1).tolist()
            rows.append(
                {"method": name, "factor": factor, "batch": batch}
                | dict(zip(("both_s", "backward_s", "communication_s"), medians, strict=True))
            )
    return {"part": "backward", "n": n, "environment": environment(), "rows": rows}


class Step:
    """Backward and averaging of an MLP of about `n` parameters."""

    def __init__(self, comm: Communicator, method: Algorithm, n: int, overlap: bool) -> None:
        import torch

        from mpicomp.torch import DistributedOptimizer

        torch.manual_seed(0)
        self._comm, self._width = comm, round(sqrt(n / LAYERS))
        layers = [torch.nn.Linear(self._width, self._width) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*(one for layer in layers for one in (layer, torch.nn.ReLU())))
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        # a communicator of its own: the progress thread must not make the calls of the other side
        self._own = Communicator(comm.mpi_comm, topology="ring", timeout=comm.timeout)
        self.optimizer = DistributedOptimizer(
            inner, method, self._own, self.model.named_parameters(), "gradients", overlap=overlap
        )

    def run(self, batch: int) -> tuple[float, float]:
        """Seconds of backward, and from its end until the means are there."""
        import torch

        self.optimizer.zero_grad()
        loss = self.model(torch.ones(batch, self._width)).square().mean()
        spin_barrier(self._comm)
        start = time.perf_counter()
        torch.autograd.backward(loss)
        between = time.perf_counter()
        self.optimizer.synchronize()
        end = time.perf_counter()
        self.optimizer.step()
        return between - start, end - between


def _median(comm: Communicator, measured: Callable[[], float], repeats: int) -> float:
    """Of the slowest rank, the same on all."""
    return float(np.median(gather(comm, np.array([measured() for _ in range(repeats)])).max(axis=0)))


def run(folder: Path, fresh: bool, n: int = N) -> list[str]:
    """Measure it unless there is a record; returns what failed."""
    path = folder / f"backward-{CLUSTER.name}.json"
    if fresh or not path.exists():
        log(f"backward: {CLUSTER.nodes} nodes, {CLUSTER.links}")
        try:
            measure_alone("backward", CLUSTER, path, n=n, repeats=REPEATS)
        except FAILURES as error:
            return [f"backward, {CLUSTER.name}: {error}"]
    return []


def over(row: dict[str, Any]) -> float:
    """How many times as long as the longer of both alone."""
    return float(row["both_s"] / max(row["backward_s"], row["communication_s"]))


def hidden(row: dict[str, Any]) -> float:
    """The part of the communication that takes no time beside backward."""
    return float(1 - max(0.0, row["both_s"] - row["backward_s"]) / row["communication_s"])


def render(records: Sequence[Record]) -> str:
    """A table of all methods and batches."""
    if not records:
        return NOTHING
    parts = []
    for record in records:
        cluster = Cluster(**record["settings"])
        note = f"{cluster.nodes} nodes, {cluster.links}, n {record['n']}. {describe(record['environment'])}."
        parts.append(f"{table(COLUMNS, record['rows'])}\n\n<sub>{note}</sub>")
    return "\n\n".join(parts)


COLUMNS = (
    ("method", get("method")),
    ("batch", get("batch")),
    ("backward, ms", in_unit("backward_s", MS)),
    ("communication, ms", in_unit("communication_s", MS)),
    ("both, ms", in_unit("both_s", MS)),
    ("both over the longer", lambda row: f"{over(row):.2f}" + (" †" if over(row) > MOST_OVER else "")),
    ("communication hidden", lambda row: f"{hidden(row):.0%}"),
)
