"""What the model of time predicts from what `mpicomp advise` measures, beside what the grid measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from apps.cluster.network import ClusterError
from benchmarks.cluster.drive import measure_alone, tell
from benchmarks.cluster.grid import TWO_LEVEL, Cell, Net, product, size_text
from benchmarks.cluster.ways import DENSE_RING, ONE_BIT_RING
from benchmarks.facts import machine_facts
from benchmarks.record import Record, scaled, table
from collectives import Communicator, LinkModel, Ring, Topology, Torus
from collectives.network import Work
from collectives.probe import measure_network
from mpicomp.advise.predict import Job, Way
from mpicomp.advise.report import duration, rate
from mpicomp.advise.speeds import Speed, measure_speed
from mpicomp.algorithms import Algorithm, Dense, Marsit

# 24 configurations, chosen before any was measured.
CELLS = (
    *product((4,), ("100mbit", "1gbit", "10gbit"), ("16MB", "100MB")),
    *product((8,), (TWO_LEVEL,), ("1MB", "16MB")),
)
# Clusters that were added later; the model was changed once since.
OTHERS = (*product((2, 8), ("1gbit", "10gbit"), ("100MB",)), *product((2, 8), ("100mbit",), ("16MB",)))
WAYS: dict[str, tuple[Algorithm, Topology]] = {
    DENSE_RING: (Dense(), Ring()),
    ONE_BIT_RING: (Marsit(None, compensation=False, global_step=1.0), Ring()),
    "one-bit torus": (Marsit(None, compensation=False, global_step=1.0), Torus()),
}
METHODS = {"dense": DENSE_RING, "one-bit": ONE_BIT_RING}
SAMPLE = 25_000_000
CLOSE, FAR = 0.2, 0.4
MS = 1e-3


def measure_here(comm: Communicator) -> Record:
    """Network and speeds of a job's ranks; collective."""
    network = measure_network(comm)
    speeds = {name: measure_speed(comm, WAYS[way][0], SAMPLE, "float32", network) for name, way in METHODS.items()}
    return {
        "part": "predicted",
        "network": asdict(network),
        "speeds": {name: {"work": asdict(speed.work), "call_s": speed.call_s} for name, speed in speeds.items()},
        "piece_bytes": comm.packed_piece_bytes(),
        "facts": machine_facts(),
    }


def run(folder: Path, fresh: bool) -> list[str]:
    """Measure the networks that are missing; returns what failed."""
    failed = []
    for net in dict.fromkeys(cell.net for cell in CELLS + OTHERS):
        path = folder / f"predicted-{net.name}.json"
        if fresh or not path.exists():
            tell(f"network and kernels: {net.nodes} nodes, {net.links}")
            try:
                measure_alone("predicted", net, path)
            except ClusterError as error:
                failed.append(f"prediction, {net.name}: {error}")
    return failed


def predict(record: Record, cell: Cell, way: str) -> float:
    """Seconds of a call."""
    algorithm, topology = WAYS[way]
    found = record["speeds"]["dense" if isinstance(algorithm, Dense) else "one-bit"]
    speed = Speed(Work(**found["work"]), found["call_s"])
    job = Job(cell.net.nodes, cell.n, "float32", LinkModel(**record["network"]), record["piece_bytes"])
    return Way(way, algorithm, topology, speed, speed).seconds(job)


def render(predicted: Sequence[Record], measured: Sequence[Record]) -> str:
    """Tables: what was measured of each network, and each prediction; and how many are close."""
    networks = {Net(**record["settings"]): record for record in predicted}
    cells = {Cell(Net(**_net(record["settings"])), record["settings"]["bytes"]): record for record in measured}
    chosen, others = _compared(CELLS, networks, cells), _compared(OTHERS, networks, cells)
    if chosen is None:
        return "Not measured yet."
    parts = [_networks(networks), chosen + " (target: 20 of 24, and none)."]
    if others is not None:
        parts += ["Other clusters:", others + "."]
    return "\n\n".join(parts)


def _compared(cells: Sequence[Cell], networks: Mapping[Net, Record], measured: Mapping[Cell, Record]) -> str | None:
    """A table of predictions, and how many are close; None: nothing is measured."""
    rows, errors = [], []
    for cell in cells:
        for way in WAYS:
            timed = measured.get(cell, {"ways": {}})["ways"].get(way)
            if cell.net in networks and timed is not None:
                seconds = predict(networks[cell.net], cell, way)
                errors.append(seconds / timed["median_s"] - 1)
                rows.append(
                    (str(cell.net.nodes), cell.net.links, size_text(cell.nbytes), way, scaled(seconds, MS),
                     scaled(timed["median_s"], MS), f"{errors[-1]:+.0%}")
                )  # fmt: skip
    if not rows:
        return None
    close, far = sum(abs(error) <= CLOSE for error in errors), sum(abs(error) > FAR for error in errors)
    columns = ("nodes", "links", "size", "way", "predicted, ms", "measured, ms", "error")
    total = f"{close} of {len(errors)} within {CLOSE:.0%}, {far} off by more than {FAR:.0%}"
    return f"{table(columns, rows)}\n\n{total}"


def _networks(networks: Mapping[Net, Record]) -> str:
    columns = (
        "nodes", "links", "latency", "each link", "groups of", "share",
        "one-bit encode + merge + decode, ns an element", "dense merge, ns",
    )  # fmt: skip
    rows = []
    for net, record in networks.items():
        link, work = record["network"], record["speeds"]["one-bit"]["work"]
        uplink = link["uplink_bytes_s"]
        rows.append(
            (str(net.nodes), net.links, duration(link["latency_s"]), rate(link["bandwidth_bytes_s"]),
             str(link["group_size"] or "–"), "–" if uplink is None else rate(uplink),
             " + ".join(f"{1e9 * work[part]:.2f}" for part in ("encode_s", "merge_s", "decode_s")),
             f"{1e9 * record['speeds']['dense']['work']['merge_s']:.2f}")
        )  # fmt: skip
    return table(columns, rows)


def _net(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in ("nodes", "rate", "between")}
