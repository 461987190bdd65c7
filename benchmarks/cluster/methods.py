"""Every method's all-reduce on slow links, beside what its bytes and its computing alone would take."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpicomp
from apps.cluster.network import ClusterError
from benchmarks.cluster.drive import measure_alone, tell
from benchmarks.cluster.grid import Net
from benchmarks.cluster.records import write
from benchmarks.cluster.vectors import fill
from benchmarks.facts import machine_facts
from benchmarks.record import Record, footer, scaled, table
from collectives import Communicator
from collectives.arrays import aligned_empty
from collectives.local import run_local
from mpicomp.algorithms import Algorithm
from mpicomp.bench.measure import gather, line_up

N = 25_000_000
REPEATS = {Net(4, "1gbit"): 7, Net(4, "100mbit"): 3}  # a dense call takes 13 s over the slower links
JUDGED = "100mbit"
"""Where a method should be faster than dense by `LEAST_OVER` of the factor in bytes, as long as that is no larger."""
LEAST_OVER, MOST_RATIO = 0.5, 16.0
METHODS: Mapping[str, Algorithm] = {
    "dense": mpicomp.algorithm("dense"),
    "Marsit": mpicomp.algorithm("marsit", full_precision_every=None),
    **{
        name: mpicomp.algorithm(name)
        for name in ("majority-vote", "ef-signsgd", "ssdm", "qsgd", "ecq-sgd", "terngrad", "one-bit-sgd")
    },
    "double-squeeze": mpicomp.algorithm("double-squeeze"),
    "double-squeeze, top-k": mpicomp.algorithm("double-squeeze", compressor="top-k:rate=100"),
    "mem-sgd": mpicomp.algorithm("mem-sgd"),
    **{name: mpicomp.algorithm(name) for name in ("scalecom", "random-k", "local-top-k", "top-k-sgd")},
}
MS = 1e-3


def measure_here(comm: Communicator, n: int, repeats: int) -> Record:
    """Time all methods in turn; collective."""
    x, out = aligned_empty(n, np.float32), aligned_empty(n, np.float32)
    fill(x, comm.rank)
    out[:] = 0
    rows: dict[str, dict[str, Any]] = {}
    started = {name: method.start(comm, n) for name, method in METHODS.items()}
    seconds = {name: np.zeros(repeats) for name in METHODS}
    for repeat in range(-1, repeats):
        for name, aggregator in started.items():
            line_up(comm)
            start = time.perf_counter()
            aggregator.aggregate(x, out)
            if repeat >= 0:
                seconds[name][repeat] = time.perf_counter() - start
    for name, aggregator in started.items():
        times = gather(comm, seconds[name]).max(axis=0)
        rows[name] = {
            "times_s": times.tolist(),
            "median_s": float(np.median(times)),
            "bytes_sent": float(gather(comm, np.array([aggregator.traffic.last.bytes_sent], np.float64)).max()),
        }
    return {"part": "methods", "n": n, "facts": machine_facts(), "rows": rows}


def computing_s(ranks: int, n: int, repeats: int = 5) -> dict[str, float]:
    """Seconds that a call of each method keeps all processors busy at the least, without a network.

    It is the processor time of as many ranks that are threads of this process, which sleep where they wait.
    """
    processors = min(ranks, len(os.sched_getaffinity(0)))

    def rank(comm: Communicator) -> dict[str, float]:
        x, out = aligned_empty(n, np.float32), aligned_empty(n, np.float32)
        fill(x, comm.rank)
        found = {}
        for name, method in METHODS.items():
            aggregator, seconds = method.start(comm, n), []
            for _ in range(1 + repeats):
                comm.barrier()
                start = time.process_time()
                aggregator.aggregate(x, out)
                comm.barrier()
                seconds.append((time.process_time() - start) / processors)
            found[name] = float(np.median(seconds[1:]))
        return found

    return run_local(ranks, rank, "ring")[0]


def run(folder: Path, fresh: bool, n: int = N) -> list[str]:
    """Measure what is missing; returns what failed."""
    failed = []
    missing = {net: folder / f"methods-{net.name}.json" for net in REPEATS}
    missing = {net: path for net, path in missing.items() if fresh or not path.exists()}
    apart: dict[int, dict[str, float]] = {}
    for net, path in missing.items():
        if net.nodes not in apart:
            tell(f"methods: {net.nodes} ranks without a network")
            apart[net.nodes] = computing_s(net.nodes, n)
        tell(f"methods: {net.nodes} nodes, {net.links}")
        try:
            record = measure_alone("methods", net, path, n=n, repeats=REPEATS[net])
        except ClusterError as error:
            failed.append(f"methods, {net.name}: {error}")
            continue
        for name, seconds in apart[net.nodes].items():
            record["rows"][name]["computing_s"] = seconds
        write(record, path)
    return failed


def render(records: Sequence[Record]) -> str:
    """A table for each cluster."""
    if not records:
        return "Not measured yet."
    parts = []
    for record in records:
        net = Net(**record["settings"])
        rate = min(link["bits_per_s"] for link in record["links"])
        dense = record["rows"]["dense"]
        judged = net.rate == JUDGED
        rows = [_row(name, row, dense, rate, judged) for name, row in record["rows"].items()]
        columns = (
            "method", "call, ms", "MB sent", "these alone, ms", "computing, ms", "call over the longer",
            "faster than dense", "fewer bytes",
        )  # fmt: skip
        parts.append(f"**{net.nodes} nodes, {net.links}**\n\n{table(columns, rows)}")
    return "\n\n".join(parts) + footer({"settings": {"n": records[0]["n"]}, "facts": records[0]["facts"]})


def _row(name: str, row: dict[str, Any], dense: dict[str, Any], bits_per_s: float, judged: bool) -> tuple[str, ...]:
    wire_s = 8 * row["bytes_sent"] / bits_per_s
    gain, ratio = dense["median_s"] / row["median_s"], dense["bytes_sent"] / row["bytes_sent"]
    short = judged and gain < LEAST_OVER * ratio and ratio <= MOST_RATIO
    return (
        name,
        scaled(row["median_s"], MS),
        f"{row['bytes_sent'] / 1e6:.3g}",
        scaled(wire_s, MS),
        scaled(row["computing_s"], MS),
        f"{row['median_s'] / max(wire_s, row['computing_s']):.2f}",
        f"{gain:.1f}" + (" †" if short else ""),
        f"{ratio:.1f}",
    )
