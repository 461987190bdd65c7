"""Methods between nodes against the same among all ranks, and sums within a node against copies of memory.

- *speed*: time of `PerNode(Marsit)`, of Marsit over every topology, and of dense sums
- *bytes*: of a call on the interface of each host, for several numbers of ranks a node
- *memory*: sums of the ranks of one node, against two copies of the vector by each of them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from apps.environment import describe, environment
from apps.performance.cluster.driver import ClusterJob, ClusterMeasurement
from apps.performance.cluster.grid import Cluster
from apps.performance.cluster.implementations import MOST_NODES_OF_A_STAR, ONE_BIT, fits
from apps.performance.cluster.predicted import closeness
from apps.performance.cluster.prepared import TIMEOUT_S, Prepared
from apps.performance.cluster.ratios import nominal_rate
from apps.performance.cluster.rounds import measure
from apps.performance.cluster.tables import ABSENT, NOTHING, format_timing
from apps.performance.cluster.vectors import Vector, make_vectors
from apps.performance.part import MS, format_seconds, get, table
from apps.records import Record
from collectives import Communicator, Ring, Topology, Torus, topology
from collectives.network_probe import measure_network
from mpicomp import Dense, Marsit, PerNode
from mpicomp.algorithms import Algorithm
from mpicomp.cli.advise.predict import PredictedJob, Way
from mpicomp.cli.advise.speeds import Speed, measure_nodes, measure_speed

N, REPEATS, DENSE_REPEATS = 25_000_000, 11, 3
MARSIT, DENSE = Marsit(full_precision_every=None), Dense()
PER_NODE, PER_NODE_DENSE, COPIES = "PerNode(Marsit)", "PerNode(dense)", "two copies"
LEAST_RATIO, LEAST_OF_MEMORY = 1.5, 0.8
SIZES = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2))
"""Nodes and ranks of each node for which the bytes of a call are counted."""
Rows = dict[str, dict[str, Any]]


def jobs(records: Path) -> Iterator[ClusterJob]:
    """Give the jobs of all kinds: with the cluster of each, and the ranks of its nodes."""
    speed = (Cluster(*size) for size in ((2, "1gbit"), (4, "1gbit"), (2, "100mbit")))
    for which, cluster, each in (
        ("memory", Cluster(1, "none"), 2),
        *(("speed", cluster, 2) for cluster in speed),
        *(("bytes", Cluster(nodes, "1gbit"), each) for nodes, each in SIZES),
    ):
        arguments = {"n": N, "repeats": REPEATS, "which": which}
        yield ClusterJob(cluster, f"two-levels-{which}-{cluster.name}x{each}", arguments, each)


@dataclass(frozen=True)
class Contender:
    """A method over a topology, between nodes or among all ranks."""

    name: str
    method: Algorithm
    topology: Topology
    per_node: bool = False

    def prepare(self, comm: Communicator, stack: ExitStack, x: Vector, out: Vector) -> Prepared:
        """Start it on a communicator of its own, which `stack` closes; collective."""
        own = stack.enter_context(
            Communicator(comm.mpi_comm, self.topology, TIMEOUT_S, ranks_per_node=comm.options.ranks_per_node)
        )
        aggregator = (PerNode(self.method) if self.per_node else self.method).start(own, x.size)
        return Prepared(partial(aggregator.aggregate, x, out), traffic=aggregator.traffic.total)


def contenders(nodes: int, ranks_per_node: int) -> list[Contender]:
    """Return all ways that are timed against each other on a cluster."""
    ranks = nodes * ranks_per_node
    over = {name: topology(name) for name in ONE_BIT if fits(name, ranks)}
    if ranks > MOST_NODES_OF_A_STAR:
        over.pop("star", None)
    rows = Torus(nodes, ranks_per_node)
    if min(rows.shape(ranks)) > 1 and rows.shape(ranks) != Torus().shape(ranks):
        over["torus, a row per node"] = rows
    return [
        Contender(PER_NODE, MARSIT, Ring(), per_node=True),
        *(Contender(f"Marsit {name}", MARSIT, one) for name, one in over.items()),
        Contender(PER_NODE_DENSE, DENSE, Ring(), per_node=True),
        Contender("dense ring", DENSE, Ring()),
    ]


def measure_here(comm: Communicator, n: int, repeats: int, which: str) -> Record:
    """Make a measurement; collective."""
    rows = {"speed": _measure_speed, "bytes": _bytes, "memory": _memory}[which](comm, n, repeats)
    sizes = {"nodes": len(comm.layout.sizes), "ranks_per_node": comm.layout.sizes[0]}
    return {"part": "two-levels", "which": which, "n": n, **sizes, "environment": environment(), "rows": rows}


def _measure_speed(comm: Communicator, n: int, repeats: int) -> Rows:
    known = contenders(len(comm.layout.sizes), comm.layout.sizes[0])
    network, nodes = measure_network(comm), measure_nodes(comm, n, "float32")
    job = PredictedJob(comm.size, n, "float32", network, comm.routes.packed_piece_bytes(), nodes)
    speeds: dict[Algorithm, Speed] = {one: measure_speed(comm, one, n, "float32", network) for one in (MARSIT, DENSE)}
    predicted = {
        one.name: Way(one.name, one.method, one.topology, speeds[one.method], speeds[DENSE], one.per_node).seconds(job)
        for one in known
    }
    repeats_of = {one.name: DENSE_REPEATS if one.method is DENSE else repeats for one in known}
    rows = _time_rounds(comm, known, n, lambda name, seconds: repeats_of[name])
    return {name: {**row, "predicted_s": predicted[name]} for name, row in rows.items()}


def _bytes(comm: Communicator, n: int, repeats: int) -> Rows:
    chosen = (PER_NODE, "Marsit ring", PER_NODE_DENSE)
    known = [one for one in contenders(len(comm.layout.sizes), comm.layout.sizes[0]) if one.name in chosen]
    return _time_rounds(comm, known, n, lambda name, seconds: 1)


def _time_rounds(comm: Communicator, known: Sequence[Contender], n: int, repeats: Callable[[str, float], int]) -> Rows:
    x, out = make_vectors(n, comm.rank)
    with ExitStack() as stack:
        return measure({one.name: one.prepare(comm, stack, x, out) for one in known}, comm, repeats)


def _memory(comm: Communicator, n: int, repeats: int) -> Rows:
    x, out = make_vectors(n, comm.rank)
    between = np.zeros_like(x)

    def copy_twice() -> None:
        np.copyto(between, x)
        np.copyto(out, between)

    with ExitStack() as stack:
        known = [Contender(PER_NODE_DENSE, DENSE, Ring(), per_node=True), Contender("dense ring", DENSE, Ring())]
        ways = {one.name: one.prepare(comm, stack, x, out) for one in known}
        over_mpi = stack.enter_context(Communicator(comm.mpi_comm, "mpi", TIMEOUT_S))
        ways["MPI"] = Prepared(partial(over_mpi.allreduce, x, out=out))
        return measure({COPIES: Prepared(copy_twice), **ways}, comm, lambda name, seconds: repeats)


# Tables --------------------------------------------------------------------------------------------------------------


def render(records: Sequence[Record]) -> str:
    """Tables of the speed on each cluster, of the bytes, and of memory."""
    if not records:
        return NOTHING
    of_kind = {which: [one for one in records if one["which"] == which] for which in ("speed", "bytes", "memory")}
    speeds = sorted(of_kind["speed"], key=lambda one: (-(nominal_rate(one) or 0), one["nodes"]))
    parts = [_speed_table(one) for one in speeds]
    if of_kind["bytes"]:
        parts.append(_bytes_table(of_kind["bytes"]))
    parts += map(_memory_table, of_kind["memory"])
    return "\n\n".join(parts)


def _speed_table(record: Record) -> str:
    best = min((name for name in record["rows"] if name.startswith("Marsit")), key=lambda name: _seconds(record, name))
    ratio = _seconds(record, best) / _seconds(record, PER_NODE)
    rows = [
        {**row, "name": name, "error": row["predicted_s"] / row["median_s"] - 1} for name, row in record["rows"].items()
    ]
    columns = (
        ("all-reduce", get("name")),
        ("call, ms", format_timing),
        ("MB out of a node", lambda row: f"{row['wire_bytes'] / 1e6:.2f}"),
        ("predicted, ms", lambda row: f"{format_seconds(row['predicted_s'], MS)} ({row['error']:+.0%})"),
    )
    close = closeness([row["error"] for row in rows])
    verdict = f"{ratio:.2f} times as fast as {best} (target: {LEAST_RATIO:g}{_name_missed(ratio >= LEAST_RATIO)})"
    heading = f"**{record['nodes']} nodes of {record['ranks_per_node']} ranks, {record['settings']['rate']}**"
    return f"{heading}\n\n{table(columns, rows)}\n\n{PER_NODE} is {verdict}. Predicted: {close}.\n\n{_footer(record)}"


def _bytes_table(records: Sequence[Record]) -> str:
    found = sorted(records, key=lambda one: (one["nodes"], one["ranks_per_node"]))

    def sent(name: str) -> Callable[[Record], str]:
        return lambda record: f"{record['rows'][name]['wire_bytes'] / 1e6:.2f}" if name in record["rows"] else ABSENT

    columns = (
        ("nodes", get("nodes")),
        ("ranks a node", get("ranks_per_node")),
        *((f"{name}, MB", sent(name)) for name in (PER_NODE, "Marsit ring", PER_NODE_DENSE)),
    )
    return f"**Bytes out of a node in a call**\n\n{table(columns, found)}\n\n{_footer(found[0])}"


def _memory_table(record: Record) -> str:
    copies = _seconds(record, COPIES)
    rows = [{**row, "name": name, "part": copies / row["median_s"]} for name, row in record["rows"].items()]
    columns = (
        ("on one node", get("name")),
        ("call, ms", format_timing),
        ("speed of two copies", lambda row: f"{row['part']:.0%}"),
    )
    part = next(row["part"] for row in rows if row["name"] == PER_NODE_DENSE)
    verdict = (
        f"{part:.0%} of the speed of {COPIES} (target: {LEAST_OF_MEMORY:.0%}{_name_missed(part >= LEAST_OF_MEMORY)})"
    )
    heading = f"**One node of {record['ranks_per_node']} ranks**"
    return f"{heading}\n\n{table(columns, rows)}\n\n{PER_NODE_DENSE} has {verdict}.\n\n{_footer(record)}"


def _seconds(record: Record, name: str) -> float:
    return float(record["rows"][name]["median_s"])


def _name_missed(reached: bool) -> str:
    return "" if reached else ", missed"


def _footer(record: Mapping[str, Any]) -> str:
    return f"<sub>n {record['n']}. {describe(record['environment'])}.</sub>"


MEASUREMENT = ClusterMeasurement("two-levels", jobs, measure_here, render)
