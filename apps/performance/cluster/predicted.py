"""Predictions of the model of time from measurements of `mpicomp advise`, next to those of the grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from apps.performance.cluster.grid import TWO_LEVEL, Cell, product
from apps.performance.cluster.implementations import DENSE_RING, MPI_DEFAULT, ONE_BIT, ONE_BIT_RING
from apps.performance.cluster.ratios import seconds as measured_s
from apps.performance.cluster.records import cell_of, in_order
from apps.performance.cluster.tables import ABSENT, NOTHING, PLACE
from apps.performance.part import MS, get, in_unit, table
from apps.records import Record
from collectives import Communicator, LinkModel, Ring, Topology, Torus, topology
from collectives.cost.link import ComputeModel
from collectives.network_probe import measure_network
from mpicomp.algorithms import Algorithm, Dense, Marsit
from mpicomp.cli.advise.predict import PredictedJob, call_seconds
from mpicomp.cli.advise.report import WORTH, duration, rate
from mpicomp.cli.advise.speeds import Speed, measure_speed, without_dense_rounds

# 24 configurations, chosen before any was measured.
CELLS = (
    *product((4,), ("100mbit", "1gbit", "10gbit"), ("16MB", "100MB")),
    *product((8,), (TWO_LEVEL,), ("1MB", "16MB")),
)
BIT = Marsit(None, compensation=False, global_step=1.0)
COMPARED: dict[str, tuple[Algorithm, Topology]] = {
    DENSE_RING: (Dense(), Ring()),
    ONE_BIT_RING: (BIT, Ring()),
    "one-bit torus": (BIT, Torus()),
}
PREDICTED = COMPARED | {
    f"one-bit {name}": (BIT, topology(name)) for name in ONE_BIT if f"one-bit {name}" not in COMPARED
}
LEAST_BYTES = 1_000_000
"""Below, calls take as long as ranks happen to wait for processors, and only the advice is compared."""
METHODS = {"dense": DENSE_RING, "one-bit": ONE_BIT_RING}
CLOSE, FAR = 0.2, 0.4


def measure_advice(comm: Communicator, n: int) -> dict[str, Any]:
    """Measure network and speeds, as `mpicomp advise` does, for vectors of `n` elements; collective."""
    network = measure_network(comm)
    speeds = {name: measure_speed(comm, COMPARED[ring][0], n, "float32", network) for name, ring in METHODS.items()}
    return {
        "network": asdict(network),
        "speeds": {name: {"work": asdict(speed.work), "call_s": speed.call_s} for name, speed in speeds.items()},
        "piece_bytes": comm.routes.packed_piece_bytes(),
    }


def predict(record: Record, name: str, cell: Cell | None = None) -> float:
    """Seconds of a call in a record's cell, or in another: the mean over predictions from each job's measurements."""
    cell, (algorithm, over) = cell or cell_of(record), PREDICTED[name]
    found = []
    for advised in record["advised"]:
        measured = advised["speeds"]["dense" if isinstance(algorithm, Dense) else "one-bit"]
        speed = Speed(ComputeModel(**measured["work"]), measured["call_s"])
        job = PredictedJob(
            cell.cluster.nodes, cell.n, "float32", LinkModel(**advised["network"]), advised["piece_bytes"]
        )
        found.append(call_seconds(job, algorithm, over, speed))
    return fmean(found)


def measure_methods(comm: Communicator, methods: Mapping[str, Algorithm], n: int) -> dict[str, float]:
    """Predict a call of each method as `mpicomp advise` does, around a ring or by its own route; collective."""
    network = measure_network(comm)
    job = PredictedJob(comm.size, n, "float32", network, comm.routes.packed_piece_bytes())
    found = {}
    for name, algorithm in methods.items():
        speed = measure_speed(comm, algorithm, n, "float32", network)
        over = algorithm.message_model(n, "float32", comm.size, job.piece_bytes).route or Ring()
        found[name] = call_seconds(job, without_dense_rounds(algorithm), over, speed)
    return found


def render(measured: Sequence[Record]) -> str:
    """Tables: measurements of each chosen cell's network, and each prediction; and how many are close."""
    known = [record for record in in_order(measured) if record["advised"]]
    advised = [record for record in known if cell_of(record).nbytes >= LEAST_BYTES]
    chosen = [record for record in advised if cell_of(record) in CELLS]
    if not chosen:
        return NOTHING
    parts = [table(NETWORK, chosen), _compare(chosen) + " (target: 20 of 24, and none)."]
    others = [record for record in advised if record not in chosen]
    if others:
        parts += ["Other cells:", _compare(others) + "."]
    parts += ["All topologies, in all these cells:", _by_implementation(advised), "And the advice:", _advice(known)]
    return "\n\n".join(parts)


def closeness(errors: Sequence[float]) -> str:
    """Count the predictions that are close, and those that are far off."""
    close, far = _counts(errors)
    return f"{close} of {len(errors)} within {CLOSE:.0%}, {far} off by more than {FAR:.0%}"


def _counts(errors: Sequence[float]) -> tuple[int, int]:
    return sum(abs(error) <= CLOSE for error in errors), sum(abs(error) > FAR for error in errors)


def _errors(records: Sequence[Record], name: str) -> list[float]:
    return [predict(record, name) / timed - 1 for record in records if (timed := measured_s(record, name))]


def _by_implementation(records: Sequence[Record]) -> str:
    """Table of the predictions' errors for each topology."""
    rows = [(name, errors) for name in PREDICTED if (errors := _errors(records, name))]
    return table(
        (
            ("all-reduce", lambda row: row[0]),
            ("cells", lambda row: str(len(row[1]))),
            (f"within {CLOSE:.0%}", lambda row: str(_counts(row[1])[0])),
            (f"off by more than {FAR:.0%}", lambda row: str(_counts(row[1])[1])),
            ("median error", lambda row: f"{median(row[1]):+.0%}"),
        ),
        rows,
    )


def _advice(records: Sequence[Record]) -> str:
    """Table of cells in which the one-bit ring was predicted, and measured, to pay; MPI's own sum is measured."""
    rows = []
    for record in records:
        mpi_s, dense_s, bit_s = (measured_s(record, name) for name in (MPI_DEFAULT, DENSE_RING, ONE_BIT_RING))
        if mpi_s is None or dense_s is None or bit_s is None:
            continue
        predicted = min(mpi_s, predict(record, DENSE_RING)) / predict(record, ONE_BIT_RING)
        gain = min(mpi_s, dense_s) / bit_s
        right = (predicted >= WORTH) == (gain >= WORTH)
        rows.append(record | {"predicted": predicted, "gain": gain, "right": right})
    columns = (
        *PLACE,
        ("predicted gain", get("predicted", ".2f")),
        ("advice", lambda row: "compress" if row["predicted"] >= WORTH else "do not compress"),
        ("measured gain", get("gain", ".2f")),
        ("right", lambda row: "yes" if row["right"] else "**no**"),
    )
    return f"{table(columns, rows)}\n\nRight in {sum(row['right'] for row in rows)} of {len(rows)} cells."


def _compare(records: Sequence[Record]) -> str:
    """A table of predictions, and how many are close."""
    rows = [
        record | {"name": name, "predicted": predict(record, name), "measured": measured}
        for record in records
        for name in COMPARED
        if (measured := measured_s(record, name)) is not None
    ]
    for row in rows:
        row["error"] = row["predicted"] / row["measured"] - 1
    columns = (
        *PLACE,
        ("all-reduce", get("name")),
        ("predicted, ms", in_unit("predicted", MS)),
        ("measured, ms", in_unit("measured", MS)),
        ("error", get("error", "+.0%")),
    )
    return f"{table(columns, rows)}\n\n{closeness([row['error'] for row in rows])}"


def _uplink(record: Record) -> str:
    found = record["advised"][0]["network"]["uplink_bytes_s"]
    return ABSENT if found is None else rate(found)


def _work(record: Record, which: str, *parts: str) -> str:
    work = record["advised"][0]["speeds"][which]["work"]
    return " + ".join(f"{1e9 * work[part]:.2f}" for part in parts)


# measurements of the first of each cell's jobs
NETWORK = (
    *PLACE,
    ("latency", lambda record: duration(record["advised"][0]["network"]["latency_s"])),
    ("each link", lambda record: rate(record["advised"][0]["network"]["bandwidth_bytes_s"])),
    ("groups of", lambda record: str(record["advised"][0]["network"]["group_size"] or ABSENT)),
    ("share", _uplink),
    (
        "one-bit encode + merge + decode, ns an element",
        lambda record: _work(record, "one-bit", "encode_s", "merge_s", "decode_s"),
    ),
    ("dense merge, ns", lambda record: _work(record, "dense", "merge_s")),
)
