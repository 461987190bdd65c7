"""What the model of time predicts from what `mpicomp advise` measures, beside what the grid measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from apps.performance.cluster.figures import seconds as measured_s
from apps.performance.cluster.grid import TWO_LEVEL, Cell, product, size_text
from apps.performance.cluster.records import cell_of, in_order
from apps.performance.cluster.ways import DENSE_RING, MPI_DEFAULT, ONE_BIT, ONE_BIT_RING
from apps.performance.record import scaled, table
from apps.records import Record
from collectives import Communicator, LinkModel, Ring, Topology, Torus, topology
from collectives.cost.link import Work
from collectives.probe import measure_network
from mpicomp.algorithms import Algorithm, Dense, Marsit
from mpicomp.cli.advise.predict import Job, Way
from mpicomp.cli.advise.report import WORTH, duration, rate
from mpicomp.cli.advise.speeds import Speed, measure_speed, without_dense_rounds

# 24 configurations, chosen before any was measured.
CELLS = (
    *product((4,), ("100mbit", "1gbit", "10gbit"), ("16MB", "100MB")),
    *product((8,), (TWO_LEVEL,), ("1MB", "16MB")),
)
BIT = Marsit(None, compensation=False, global_step=1.0)
WAYS: dict[str, tuple[Algorithm, Topology]] = {
    DENSE_RING: (Dense(), Ring()),
    ONE_BIT_RING: (BIT, Ring()),
    "one-bit torus": (BIT, Torus()),
}
EVERY_WAY = WAYS | {f"one-bit {name}": (BIT, topology(name)) for name in ONE_BIT if f"one-bit {name}" not in WAYS}
LEAST_BYTES = 1_000_000
"""Below, calls take as long as ranks happen to wait for processors, and only the advice is compared."""
METHODS = {"dense": DENSE_RING, "one-bit": ONE_BIT_RING}
CLOSE, FAR = 0.2, 0.4
MS = 1e-3


def measure_advice(comm: Communicator, n: int) -> dict[str, Any]:
    """What `mpicomp advise` finds of network and speeds for vectors of `n` elements; collective."""
    network = measure_network(comm)
    speeds = {name: measure_speed(comm, WAYS[way][0], n, "float32", network) for name, way in METHODS.items()}
    return {
        "network": asdict(network),
        "speeds": {name: {"work": asdict(speed.work), "call_s": speed.call_s} for name, speed in speeds.items()},
        "piece_bytes": comm.packed_piece_bytes(),
    }


def predict(record: Record, way: str, cell: Cell | None = None) -> float:
    """Seconds of a call in a record's cell, or in another: the mean of what follows from each job's measurements."""
    cell, (algorithm, over) = cell or cell_of(record), EVERY_WAY[way]
    found = []
    for advised in record["advised"]:
        measured = advised["speeds"]["dense" if isinstance(algorithm, Dense) else "one-bit"]
        speed = Speed(Work(**measured["work"]), measured["call_s"])
        job = Job(cell.net.nodes, cell.n, "float32", LinkModel(**advised["network"]), advised["piece_bytes"])
        found.append(Way(way, algorithm, over, speed, speed).seconds(job))
    return fmean(found)


def measure_methods(comm: Communicator, methods: Mapping[str, Algorithm], n: int) -> dict[str, float]:
    """What `mpicomp advise` says that a call of each method takes, around a ring or by its own route; collective."""
    network = measure_network(comm)
    job = Job(comm.size, n, "float32", network, comm.packed_piece_bytes())
    found = {}
    for name, algorithm in methods.items():
        speed = measure_speed(comm, algorithm, n, "float32", network)
        over = algorithm.message_model(n, "float32", comm.size, job.piece_bytes).route or Ring()
        found[name] = Way(name, without_dense_rounds(algorithm), over, speed, speed).seconds(job)
    return found


def render(measured: Sequence[Record]) -> str:
    """Tables: what was measured of each chosen cell's network, and each prediction; and how many are close."""
    known = [record for record in in_order(measured) if record.get("advised")]
    advised = [record for record in known if cell_of(record).nbytes >= LEAST_BYTES]
    chosen = [record for record in advised if cell_of(record) in CELLS]
    if not chosen:
        return "Not measured yet."
    parts = [_networks(chosen), _compared(chosen) + " (target: 20 of 24, and none)."]
    others = [record for record in advised if record not in chosen]
    if others:
        parts += ["Other cells:", _compared(others) + "."]
    parts += ["All topologies, in all these cells:", _by_way(advised), "And the advice:", _advice(known)]
    return "\n\n".join(parts)


def _by_way(records: Sequence[Record]) -> str:
    """How near predictions come, by way."""
    rows = []
    for way in EVERY_WAY:
        errors = [predict(record, way) / timed - 1 for record in records if (timed := measured_s(record, way))]
        if errors:
            close, far = sum(abs(error) <= CLOSE for error in errors), sum(abs(error) > FAR for error in errors)
            rows.append((way, str(len(errors)), str(close), str(far), f"{median(errors):+.0%}"))
    columns = ("way", "cells", f"within {CLOSE:.0%}", f"off by more than {FAR:.0%}", "median error")
    return table(columns, rows)


def _advice(records: Sequence[Record]) -> str:
    """In each cell whether the one-bit ring was predicted, and measured, to be worth it; MPI's own sum is measured."""
    rows, right = [], 0
    for record in records:
        mpi_s, dense_s, bit_s = (measured_s(record, way) for way in (MPI_DEFAULT, DENSE_RING, ONE_BIT_RING))
        if mpi_s is None or dense_s is None or bit_s is None:
            continue
        gains = (
            min(mpi_s, predict(record, DENSE_RING)) / predict(record, ONE_BIT_RING),
            min(mpi_s, dense_s) / bit_s,
        )
        says, is_so = ("compress" if gain >= WORTH else "do not compress" for gain in gains)
        right += says == is_so
        rows.append((*_place(record), f"{gains[0]:.2f}", says, f"{gains[1]:.2f}", "yes" if says == is_so else "**no**"))
    columns = ("nodes", "links", "size", "predicted gain", "advice", "measured gain", "right")
    return f"{table(columns, rows)}\n\nRight in {right} of {len(rows)} cells."


def _compared(records: Sequence[Record]) -> str:
    """A table of predictions, and how many are close."""
    rows, errors = [], []
    for record in records:
        for way in WAYS:
            timed = record["ways"].get(way)
            if timed is not None:
                seconds = predict(record, way)
                errors.append(seconds / timed["median_s"] - 1)
                rows.append(
                    (*_place(record), way, scaled(seconds, MS), scaled(timed["median_s"], MS), f"{errors[-1]:+.0%}")
                )
    close, far = sum(abs(error) <= CLOSE for error in errors), sum(abs(error) > FAR for error in errors)
    columns = ("nodes", "links", "size", "way", "predicted, ms", "measured, ms", "error")
    total = f"{close} of {len(errors)} within {CLOSE:.0%}, {far} off by more than {FAR:.0%}"
    return f"{table(columns, rows)}\n\n{total}"


def _networks(records: Sequence[Record]) -> str:
    """What the first of each cell's jobs measured."""
    columns = (
        "nodes", "links", "size", "latency", "each link", "groups of", "share",
        "one-bit encode + merge + decode, ns an element", "dense merge, ns",
    )  # fmt: skip
    rows = []
    for record in records:
        advised = record["advised"][0]
        link, work = advised["network"], advised["speeds"]["one-bit"]["work"]
        uplink = link["uplink_bytes_s"]
        rows.append(
            (*_place(record), duration(link["latency_s"]), rate(link["bandwidth_bytes_s"]),
             str(link["group_size"] or "–"), "–" if uplink is None else rate(uplink),
             " + ".join(f"{1e9 * work[part]:.2f}" for part in ("encode_s", "merge_s", "decode_s")),
             f"{1e9 * advised['speeds']['dense']['work']['merge_s']:.2f}")
        )  # fmt: skip
    return table(columns, rows)


def _place(record: Record) -> tuple[str, str, str]:
    cell = cell_of(record)
    return str(cell.net.nodes), cell.net.links, size_text(cell.nbytes)
