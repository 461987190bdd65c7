"""Every method's all-reduce on slow links, next to the times of its bytes alone and of its computing alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.environment import describe, environment
from apps.performance.cluster.driver import ClusterJob, ClusterMeasurement
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.predicted import closeness, measure_methods
from apps.performance.cluster.prepared import Prepared
from apps.performance.cluster.rounds import measure
from apps.performance.cluster.tables import ABSENT, NOTHING, scaling, timing
from apps.performance.cluster.vectors import filled
from apps.performance.part import MS, get, in_unit, scaled, table
from apps.records import Record
from collectives import Communicator
from mpicomp.algorithms import Aggregator, Algorithm
from mpicomp.cli.timing import gather, spin_barrier, turns

N = 25_000_000
REPEATS = {Cluster(4, "1gbit"): 7, Cluster(4, "100mbit"): 3}  # a dense call takes 13 s over the slower links
JUDGED = "100mbit"
"""Where a method should be faster than dense by `LEAST_OVER` of the factor in bytes, as long as that is no larger."""
LEAST_OVER, MOST_RATIO = 0.5, 16.0
METHODS: Mapping[str, Algorithm] = {
    "dense": mpicomp.algorithm("dense"),
    "Marsit": mpicomp.algorithm("marsit", full_precision_every=None),
    "Marsit, one winner": mpicomp.algorithm("marsit", full_precision_every=None, winners=1),
    "Marsit, two winners": mpicomp.algorithm("marsit", full_precision_every=None, winners=2),
    **{f"relay, {levels} levels": mpicomp.algorithm("relay", levels=levels) for levels in (2, 4, 16)},
    **{
        name: mpicomp.algorithm(name)
        for name in ("majority-vote", "ef-signsgd", "ssdm", "qsgd", "ecq-sgd", "terngrad", "one-bit-sgd")
    },
    "double-squeeze": mpicomp.algorithm("double-squeeze"),
    "double-squeeze, 4 levels": mpicomp.algorithm("double-squeeze", compressor="levels:levels=4,bucket=128"),
    "double-squeeze, top-k": mpicomp.algorithm("double-squeeze", compressor="top-k:rate=100"),
    "mem-sgd": mpicomp.algorithm("mem-sgd"),
    **{name: mpicomp.algorithm(name) for name in ("scalecom", "random-k", "local-top-k", "top-k-sgd")},
}
COMPUTE = "compute"
SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 32


def measure_here(comm: Communicator, n: int, repeats: int) -> Record:
    """Predict all methods, and time them in turn with the computing of a training step; collective."""
    predicted = measure_methods(comm, METHODS, n) if comm.size > 1 else {}
    x, out = filled(n, comm.rank)
    started = {name: method.start(comm, n) for name, method in METHODS.items()}
    step = training_step(n, comm.rank)
    prepared = {COMPUTE: Prepared(step)} | {
        name: Prepared(partial(one.aggregate, x, out), traffic=one.traffic.total) for name, one in started.items()
    }
    rows = measure(prepared, comm, lambda name, seconds: repeats)
    codec_s: dict[str, list[float]] = {name: [] for name in started}
    for name in turns(dict.fromkeys(started, -(-repeats // 2))):
        spin_barrier(comm)
        codec_s[name].append(codec_processor_s(started[name], x, out))
    for name in started:
        rows[name] |= {
            "codec_s": np.median(gather(comm, np.array(codec_s[name])), axis=1).tolist(),
            "predicted_s": predicted.get(name),
        }
    compute = rows.pop(COMPUTE) | {"parameters": step(), "batch": BATCH}
    return {"part": "methods", "n": n, "environment": environment(), "rows": rows, "compute": compute}


def training_step(n: int, seed: int) -> Callable[[], int]:
    """Forward and backward, on one thread, of an MLP of about `n` parameters on a batch of `BATCH` images.

    The MLP has two equal hidden layers. The result of a call is how many elements the gradients have.
    """
    import torch  # which other jobs can do without
    from torch.nn.functional import cross_entropy

    from apps.train.models import build

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    linear = prod(SHAPE) + CLASSES + 2  # per unit: weights in and out, two biases; between the layers its square
    hidden = max(1, round((sqrt(linear**2 + 4 * max(0, n - CLASSES)) - linear) / 2))
    model = build("mlp", SHAPE, CLASSES, [hidden] * 2, None)
    images, labels = torch.rand(BATCH, *SHAPE), torch.randint(CLASSES, (BATCH,))

    def step() -> int:
        model.zero_grad()
        torch.autograd.backward(cross_entropy(model(images), labels))
        return sum(0 if one.grad is None else one.grad.numel() for one in model.parameters())

    return step


def codec_processor_s(aggregator: Aggregator, x: NDArray[Any], out: NDArray[Any]) -> float:
    """Processor seconds of this rank's encoding, merging and decoding in one call, without MPI, polling and Python.

    The stages are timed by the clock of the thread. The clock on the wall goes on while another rank has the processor.
    """
    aggregator.traffic.clock = time.thread_time
    aggregator.aggregate(x, out)
    aggregator.traffic.clock = time.perf_counter
    cost = aggregator.traffic.last
    return cost.seconds_encoding + cost.seconds_merging + cost.seconds_decoding


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give a job for each cluster."""
    for cluster, repeats in REPEATS.items():
        yield ClusterJob(cluster, f"methods-{cluster.name}", {"n": N, "repeats": repeats})


def render(records: Sequence[Record]) -> str:
    """A table for each cluster."""
    if not records:
        return NOTHING
    parts = []
    for record in records:
        cluster, compute = Cluster(**record["settings"]), record["compute"]
        network = f"an MLP of {compute['parameters']:,} parameters, {compute['batch']} images a rank"
        heading = (
            f"**{cluster.nodes} nodes, {cluster.links}** (forward and backward of {network}: {timing(compute)} ms)"
        )
        rows = [_derived(record, name) for name in record["rows"]]
        close = closeness([row["error"] for row in rows if row["error"] is not None])
        parts.append(f"{heading}\n\n{table(COLUMNS, rows)}\n\nPredicted: {close}.")
    note = f"n {records[0]['n']}. {describe(records[0]['environment'])}.{scaling(records)}"
    return "\n\n".join(parts) + f"\n\n<sub>{note}</sub>"


def _derived(record: Record, name: str) -> dict[str, Any]:
    """Return a method's row with values that follow from it and from dense's."""
    row, dense = record["rows"][name], record["rows"]["dense"]
    sent, each_s = row["cost"]["bytes_sent_most"], row["codec_s"]
    # the least time in which processors that all ranks share do what each of them computes
    codec_s = max(*each_s, sum(each_s) / record["environment"]["cores"])
    wire_s = 8 * sent / min(link["bits_per_s"] for link in record["links"])
    gain, ratio = dense["median_s"] / row["median_s"], dense["cost"]["bytes_sent_most"] / sent
    judged = record["settings"]["rate"] == JUDGED and ratio <= MOST_RATIO
    return row | {
        "name": name,
        "sent": sent,
        "wire_s": wire_s,
        "codec_one_s": float(np.mean(each_s)),
        "codec_all_s": codec_s,
        "over": row["median_s"] / max(wire_s, codec_s),
        "gain": f"{gain:.1f}" + (" †" if judged and gain < LEAST_OVER * ratio else ""),
        "ratio": ratio,
        "error": None if row["predicted_s"] is None else row["predicted_s"] / row["median_s"] - 1,
    }


def _predicted(row: dict[str, Any]) -> str:
    return ABSENT if row["error"] is None else f"{scaled(row['predicted_s'], MS)} ({row['error']:+.0%})"


COLUMNS = (
    ("method", get("name")),
    ("call, ms", timing),
    ("MB sent", lambda row: f"{row['sent'] / 1e6:.3g}"),
    ("these alone, ms", in_unit("wire_s", MS)),
    ("codec of a rank, ms", in_unit("codec_one_s", MS)),
    ("of all ranks, ms", in_unit("codec_all_s", MS)),
    ("call over the longer", get("over", ".2f")),
    ("faster than dense", get("gain")),
    ("fewer bytes", get("ratio", ".1f")),
    ("predicted, ms", _predicted),
)
MEASUREMENT = ClusterMeasurement("methods", jobs, measure_here, render)
