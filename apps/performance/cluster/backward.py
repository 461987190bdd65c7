"""Part of a training step's communication that is hidden behind backward.

*Backward* is that of the model alone. *Communication* is the averaging of the gradients of all buckets, one after the
other, when backward is over. *Both* is backward with the buckets begun from its hooks, until the last mean is there.
All take turns. The size of the batch sets how long backward takes. *Exposed* is the part of both in which the rank
waits for calls in flight, as the trace has it. *Computing* is the part of communication alone in which the rank does
not wait: it encodes, copies, sends. Where a rank has one core, both cannot take less than backward and computing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import mpicomp
from apps.environment import describe, environment
from apps.performance.cluster.driver import ClusterJob, ClusterMeasurement
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.ratios import payload_rate
from apps.performance.cluster.tables import NOTHING
from apps.performance.part import MS, get, in_unit, table
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Algorithm
from mpicomp.cli.timing import gather, spin_barrier

N, LAYERS, REPEATS = 25_000_000, 12, 9
FACTORS = (0.5, 1.0, 2.0)
"""Of backward in units of communication: aimed at when batches are chosen. Measured ratios differ."""
MOST_OVER = 1.2
EARLY = "early"
METHODS: dict[str, Algorithm] = {
    "dense": mpicomp.Dense(),
    "Marsit": mpicomp.Marsit(None),
    "DoubleSqueeze": mpicomp.DoubleSqueeze(),
}
CLUSTERS = {Cluster(2, "1gbit"): tuple(METHODS), Cluster(2, "100mbit"): ("Marsit", "DoubleSqueeze")}
"""With their methods: a dense step at 100 Mbit/s takes ten seconds, and hides as much as at 1 Gbit/s."""
FIRST_BATCH, SECOND_BATCH, LONGEST_BATCH = 16, 512, 4096
CALIBRATION_STEPS, CORRECTIONS = 5, 3


def measure_here(comm: Communicator, n: int, methods: Sequence[str], repeats: int) -> Record:
    """Time methods with batches that are to make backward `FACTORS` times as long as communication; collective."""
    import torch  # which other jobs can do without

    torch.set_num_threads(1)
    rows = [row for name in methods for row in _measure_method(comm, name, n, repeats)]
    return {"part": "backward", "n": n, "environment": environment(), "rows": rows}


def _backward_and_rest(comm: Communicator, step: Step, batch: int) -> list[float]:
    """Seconds of backward, and of the communication behind it, with batches of this size; collective."""
    return _medians(comm, [(one.backward_s, one.rest_s) for one in map(step.run, [batch] * CALIBRATION_STEPS)])


def _fit_batch(comm: Communicator, step: Step, backward_s: float, each_s: float) -> int:
    """The batch whose backward takes so long, where an example more takes `each_s`; collective."""
    batch = FIRST_BATCH
    for _ in range(CORRECTIONS):  # a small batch takes less than a line through two larger ones says
        short_s = backward_s - _backward_and_rest(comm, step, batch)[0]
        batch = max(1, min(LONGEST_BATCH, round(batch + short_s / each_s)))
    return batch


def _measure_method(comm: Communicator, name: str, n: int, repeats: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        early, late = (Step(comm, METHODS[name], n, Path(folder) / which) for which in (EARLY, "late"))
        for step in (early, late):
            step.run(FIRST_BATCH)  # lays out the buckets
        small, large = (_backward_and_rest(comm, late, batch) for batch in (FIRST_BATCH, SECOND_BATCH))
        each_s = max(large[0] - small[0], 1e-6) / (SECOND_BATCH - FIRST_BATCH)
        batches = [_fit_batch(comm, late, factor * small[1], each_s) for factor in FACTORS]
        rounds = [[(early.run(batch), late.run(batch)) for _ in range(repeats)] for batch in batches]
        late.close()
        early.close()  # writes the trace
        exposed, waits = (
            _spans(Path(folder) / which / f"rank-{comm.rank}.json", kind)
            for which, kind in ((EARLY, "exposed"), ("late", "wait"))
        )
    rows = []
    for factor, batch, pairs in zip(FACTORS, batches, rounds, strict=True):
        values = [
            (
                both.backward_s + both.rest_s,
                apart.backward_s,
                apart.rest_s,
                apart.rest_s - _within(waits, apart.span),
                _within(exposed, both.span),
            )
            for both, apart in pairs
        ]
        names = ("both_s", "backward_s", "communication_s", "computing_s", "exposed_s")
        medians = dict(zip(names, _medians(comm, values), strict=True))
        rows.append({"method": name, "factor": factor, "batch": batch} | medians)
    return rows


def _spans(path: Path, kind: str) -> list[tuple[float, float]]:
    """The spans of one kind in a rank's trace, in its seconds."""
    events = json.loads(path.read_text())["traceEvents"]
    return [(1e-6 * one["ts"], 1e-6 * (one["ts"] + one["dur"])) for one in events if one.get("cat") == kind]


def _within(spans: Sequence[tuple[float, float]], span: tuple[float, float]) -> float:
    return sum(max(0.0, min(end, span[1]) - max(start, span[0])) for start, end in spans)


class Times(NamedTuple):
    """Return the seconds of backward, of the rest until the means are there, and of both by the trace's clock."""

    backward_s: float
    rest_s: float
    span: tuple[float, float]


class Step:
    """Backward and averaging of an MLP of about `n` parameters; at once, if `trace` is the folder `EARLY`."""

    def __init__(self, comm: Communicator, method: Algorithm, n: int, trace: Path) -> None:
        import torch

        from mpicomp.torch import DistributedOptimizer

        torch.manual_seed(0)
        self._comm, self._width = comm, round(sqrt(n / LAYERS))
        layers = [torch.nn.Linear(self._width, self._width) for _ in range(LAYERS)]
        self.model = torch.nn.Sequential(*(one for layer in layers for one in (layer, torch.nn.ReLU())))
        inner = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        # a communicator of its own: the progress thread must not make the calls of the other side
        self._own = Communicator(comm.mpi_comm, topology="ring", timeout=comm.timeout, trace=trace)
        self.optimizer = DistributedOptimizer(
            inner, method, self._own, self.model.named_parameters(), "gradients", overlap=trace.name == EARLY
        )

    def run(self, batch: int) -> Times:
        """One step."""
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
        trace = self._own.trace
        assert trace is not None
        return Times(between - start, end - between, (trace.aligned(start), trace.aligned(end)))

    def close(self) -> None:
        """Write the trace; collective."""
        self._own.close()


def _medians(comm: Communicator, values: Sequence[Sequence[float]]) -> list[float]:
    """Return each column's values on the slowest rank, the same on all ranks."""
    medians: list[float] = np.median(gather(comm, np.array(values)).max(axis=0), axis=0).tolist()
    return medians


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give a job for each cluster."""
    for cluster, names in CLUSTERS.items():
        yield ClusterJob(cluster, f"backward-{cluster.name}", {"n": N, "methods": names, "repeats": REPEATS})


def over(row: dict[str, Any]) -> float:
    """Return the time relative to the longer of both alone."""
    return float(row["both_s"] / max(row["backward_s"], row["communication_s"]))


def over_communication(row: dict[str, Any]) -> float:
    """Return the ratio of the times of backward and of communication."""
    return float(row["backward_s"] / row["communication_s"])


def render(records: Sequence[Record]) -> str:
    """A table of all methods and batches for each cluster."""
    if not records:
        return NOTHING
    parts = []
    for record in sorted(records, key=payload_rate, reverse=True):
        cluster = Cluster(**record["settings"])
        note = f"{cluster.nodes} nodes, {cluster.links}, n {record['n']}. {describe(record['environment'])}."
        parts.append(f"{table(COLUMNS, record['rows'])}\n\n<sub>{note}</sub>")
    return "\n\n".join(parts)


COLUMNS = (
    ("method", get("method")),
    ("batch", get("batch")),
    ("backward over communication", lambda row: f"{over_communication(row):.2f}"),
    ("backward, ms", in_unit("backward_s", MS)),
    ("communication, ms", in_unit("communication_s", MS)),
    ("its computing, ms", in_unit("computing_s", MS)),
    ("both, ms", in_unit("both_s", MS)),
    ("both over the longer", lambda row: f"{over(row):.2f}" + (" †" if over(row) > MOST_OVER else "")),
    ("exposed, ms", in_unit("exposed_s", MS)),
)
MEASUREMENT = ClusterMeasurement("backward", jobs, measure_here, render)
