"""Every method's all-reduce on slow links, beside what its bytes and its computing alone would take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpicomp
from apps.cluster.network import ClusterError
from benchmarks.cluster.drive import measure_methods_of, tell
from benchmarks.cluster.grid import Net
from benchmarks.cluster.vectors import fill
from benchmarks.facts import machine_facts
from benchmarks.record import Record, footer, scaled, table
from collectives import Communicator
from collectives.arrays import aligned_empty
from mpicomp.algorithms import Algorithm
from mpicomp.bench.measure import gather, line_up

N, REPEATS = 25_000_000, 5
NETS = (Net(4, "1gbit"), Net(4, "100mbit"))
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
    """Time all methods in turn; collective. Computing alone: the same calls with ranks that are threads apart."""
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
        total = aggregator.traffic.total
        sent = gather(comm, np.array([total.bytes_sent / total.calls])).max()
        spent = total.seconds_encoding + total.seconds_merging + total.seconds_decoding
        rows[name] = {
            "times_s": times.tolist(),
            "median_s": float(np.median(times)),
            "bytes_sent": float(sent),
            "computing_s": float(gather(comm, np.array([spent / total.calls])).mean()),
        }
    return {"part": "methods", "n": n, "facts": machine_facts(), "rows": rows}


def run(folder: Path, fresh: bool, n: int = N, repeats: int = REPEATS) -> list[str]:
    """Measure what is missing; returns what failed."""
    failed = []
    for net in NETS:
        path = folder / f"methods-{net.name}.json"
        if path.exists() and not fresh:
            continue
        tell(f"methods: {net.nodes} nodes, {net.links}")
        try:
            measure_methods_of(net, path, n, repeats)
        except ClusterError as error:
            failed.append(f"methods, {net.name}: {error}")
    return failed


def render(records: Sequence[Record]) -> str:
    """A table for each cluster."""
    parts = []
    for record in records:
        net, rows = Net(**record["settings"]), []
        rate = min(link["bits_per_s"] for link in record["links"])
        dense_s = record["rows"]["dense"]["median_s"]
        dense_bytes = record["rows"]["dense"]["bytes_sent"]
        for name, row in record["rows"].items():
            wire_s = 8 * row["bytes_sent"] / rate
            bound_s = max(wire_s, row["computing_s"])
            rows.append(
                (
                    name,
                    scaled(row["median_s"], MS),
                    f"{row['bytes_sent'] / 1e6:.3g}",
                    scaled(wire_s, MS),
                    scaled(row["computing_s"], MS),
                    f"{row['median_s'] / bound_s:.2f}",
                    f"{dense_s / row['median_s']:.1f}",
                    f"{dense_bytes / row['bytes_sent']:.1f}",
                )
            )
        columns = (
            "method", "call, ms", "MB sent", "these alone, ms", "computing, ms", "call over the longer",
            "over dense", "volume under dense",
        )  # fmt: skip
        parts.append(f"**{net.nodes} nodes, {net.links}**\n\n{table(columns, rows)}")
    if not parts:
        return "Not measured yet."
    return "\n\n".join(parts) + footer({"settings": {"n": records[0]["n"]}, "facts": records[0]["facts"]})
