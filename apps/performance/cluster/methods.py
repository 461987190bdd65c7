"""Every method's all-reduce on slow links, beside what its bytes and its computing alone would take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mpicomp
from apps.environment import describe, environment
from apps.performance.cluster.drive import FAILURES, measure_alone, tell
from apps.performance.cluster.grid import Net
from apps.performance.cluster.predicted import CLOSE, FAR, measure_methods
from apps.performance.cluster.rounds import WARMED_S, costs_of, mean_cost, timed
from apps.performance.cluster.tables import scaling
from apps.performance.cluster.vectors import fill
from apps.performance.record import both, scaled, table
from apps.records import Record, write_record
from collectives import Communicator
from collectives.memory import aligned_empty
from mpicomp.algorithms import Aggregator, Algorithm
from mpicomp.cli.timing import gather, spin_barrier

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
    """Predict all methods, and time them in turn and what a training step computes; collective."""
    from apps.performance.cluster.computing import BATCH, training_step  # torch, which other jobs can do without

    predicted = measure_methods(comm, METHODS, n) if comm.size > 1 else {}
    x, out = aligned_empty(n, np.float32), aligned_empty(n, np.float32)
    fill(x, comm.rank)
    out[:] = 0
    started = {name: method.start(comm, n) for name, method in METHODS.items()}
    step = training_step(n, comm.rank)
    parameters = step()
    computing = np.zeros((repeats, 2))
    spent: dict[str, list[NDArray[np.float64]]] = {name: [] for name in METHODS}
    codec = {name: np.zeros(-(-repeats // 2)) for name in METHODS}
    took = np.zeros(len(started))
    for repeat in range(-2, repeats):  # two rounds are not counted; the second tells who is quick
        step()
        computing[max(0, repeat)] = timed(step, comm)  # the first that counts takes the place of the others
        for i, (name, aggregator) in enumerate(started.items()):
            call = partial(aggregator.aggregate, x, out)
            if repeat >= 0 and took[i] <= WARMED_S:
                call()
            elapsed, cpu = timed(call, comm)
            if repeat < 0:
                took[i] = elapsed
            else:
                spent[name].append(np.array([elapsed, cpu, *costs_of(aggregator.traffic.last)]))
            if repeat >= 0 and repeat % 2 == 0:
                spin_barrier(comm)
                codec[name][repeat // 2] = codec_processor_s(aggregator, x, out)
        if repeat == -1:
            took = gather(comm, took).max(axis=0)
    rows = {}
    for name, aggregator in started.items():
        mine = np.array(spent[name])
        rows[name] = {
            **summary(comm, mine[:, :2]),
            "cost": mean_cost(comm, mine[:, 2:].mean(axis=0)),
            "bytes_sent": float(gather(comm, np.array([aggregator.traffic.last.bytes_sent], np.float64)).max()),
            "codec_s": np.median(gather(comm, codec[name]), axis=1).tolist(),
            "predicted_s": predicted.get(name),
        }
    compute = summary(comm, computing) | {"parameters": parameters, "batch": BATCH}
    return {"part": "methods", "n": n, "environment": environment(), "rows": rows, "compute": compute}


def summary(comm: Communicator, mine: NDArray[np.float64]) -> dict[str, Any]:
    """Of this rank's elapsed and processor seconds of each call, ``[calls, 2]``; collective.

    Returns
    -------
    dict
        ``times_s`` of the slowest rank, their ``median_s`` and ``min_s``; ``elapsed_s`` and ``cpu_s``, means over
        calls and ranks.
    """
    everyones = gather(comm, mine)
    times = everyones[:, :, 0].max(axis=0)
    elapsed_s, cpu_s = everyones.mean(axis=(0, 1)).tolist()
    return {"times_s": times.tolist(), "median_s": float(np.median(times)), "min_s": float(times.min()),
            "elapsed_s": elapsed_s, "cpu_s": cpu_s}  # fmt: skip


def codec_processor_s(aggregator: Aggregator, x: NDArray[Any], out: NDArray[Any]) -> float:
    """Processor time of this rank's encoding, merging and decoding in one call; MPI, polling and Python are left out.

    The stages are timed as always, only by the clock of the thread instead of that on the wall, which goes on while
    another rank has the processor.
    """
    aggregator.traffic.clock = time.thread_time
    aggregator.aggregate(x, out)
    aggregator.traffic.clock = time.perf_counter
    cost = aggregator.traffic.last
    return cost.seconds_encoding + cost.seconds_merging + cost.seconds_decoding


def computing_s(codec_s: Sequence[float], processors: int) -> float:
    """The least time in which processors that all ranks share do what each of them computes."""
    return max(max(codec_s), sum(codec_s) / processors)


def run(folder: Path, fresh: bool, n: int = N) -> list[str]:
    """Measure what is missing; returns what failed."""
    failed = []
    missing = {net: folder / f"methods-{net.name}.json" for net in REPEATS}
    missing = {net: path for net, path in missing.items() if fresh or not path.exists()}
    for net, path in missing.items():
        tell(f"methods: {net.nodes} nodes, {net.links}")
        try:
            write_record(path, measure_alone("methods", net, path, n=n, repeats=REPEATS[net]))
        except FAILURES as error:
            failed.append(f"methods, {net.name}: {error}")
    return failed


def render(records: Sequence[Record]) -> str:
    """A table for each cluster."""
    if not records:
        return "Not measured yet."
    parts = []
    for record in records:
        net = Net(**record["settings"])
        rows = [_row(name, record, net.rate == JUDGED) for name in record["rows"]]
        columns = (
            "method", "call, ms", "MB sent", "these alone, ms", "codec of a rank, ms", "of all ranks, ms",
            "call over the longer", "faster than dense", "fewer bytes", "predicted, ms",
        )  # fmt: skip
        heading = f"**{net.nodes} nodes, {net.links}**{_computing(record)}"
        parts.append(f"{heading}\n\n{table(columns, rows)}{_predictions(record)}")
    note = f"n {records[0]['n']}. {describe(records[0]['environment'])}.{scaling(records)}"
    return "\n\n".join(parts) + f"\n\n<sub>{note}</sub>"


def _error(row: dict[str, Any]) -> float | None:
    """How far the prediction is off; None where there is none."""
    return None if row.get("predicted_s") is None else float(row["predicted_s"] / row["median_s"] - 1)


def _predictions(record: Record) -> str:
    """How many are close."""
    errors = [abs(error) for row in record["rows"].values() if (error := _error(row)) is not None]
    if not errors:
        return ""
    close, far = sum(error <= CLOSE for error in errors), sum(error > FAR for error in errors)
    return f"\n\nPredicted: {close} of {len(errors)} within {CLOSE:.0%}, {far} off by more than {FAR:.0%}."


def _computing(record: Record) -> str:
    """What the training step took; older records do not tell."""
    compute = record.get("compute")
    if compute is None:
        return ""
    network = f"an MLP of {compute['parameters']:,} parameters, {compute['batch']} images a rank"
    return f" (forward and backward of {network}: {_call(compute)} ms)"


def _call(row: dict[str, Any]) -> str:
    """Median, minimum, and processor time of a rank; of older records the median alone."""
    return f"{both(row, MS)} / {scaled(row['cpu_s'], MS)}" if "cpu_s" in row else scaled(row["median_s"], MS)


def _row(name: str, record: Record, judged: bool) -> tuple[str, ...]:
    row, dense = record["rows"][name], record["rows"]["dense"]
    wire_s = 8 * row["bytes_sent"] / min(link["bits_per_s"] for link in record["links"])
    codec_s = computing_s(row["codec_s"], record["environment"]["cores"])
    gain, ratio = dense["median_s"] / row["median_s"], dense["bytes_sent"] / row["bytes_sent"]
    short = judged and gain < LEAST_OVER * ratio and ratio <= MOST_RATIO
    error = _error(row)
    return (
        name,
        _call(row),
        f"{row['bytes_sent'] / 1e6:.3g}",
        scaled(wire_s, MS),
        scaled(float(np.mean(row["codec_s"])), MS),
        scaled(codec_s, MS),
        f"{row['median_s'] / max(wire_s, codec_s):.2f}",
        f"{gain:.1f}" + (" †" if short else ""),
        f"{ratio:.1f}",
        "–" if error is None else f"{scaled(row['predicted_s'], MS)} ({error:+.0%})",
    )
