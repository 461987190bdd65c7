"""Program of the ranks: ``python -m apps.performance.cluster.job REQUEST``, a JSON file that `driver` writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import mpicomp
from apps.environment import environment
from apps.performance.cluster.grid import Cell, Cluster
from apps.performance.cluster.implementations import SLOW_S, Implementation, of_library
from apps.performance.cluster.measurements import MEASUREMENTS
from apps.performance.cluster.predicted import measure_advice
from apps.performance.cluster.prepared import TIMEOUT_S, Resources
from apps.performance.cluster.rounds import measure, repeats_for
from apps.performance.cluster.vectors import make_vectors
from apps.records import Record, write_record
from collectives import Communicator


def main(argv: Sequence[str] | None = None) -> int:
    """Measure as requested; rank 0 writes each record as soon as it has it."""
    mpicomp.install_abort_hook()
    request = json.loads(Path((sys.argv[1:] if argv is None else argv)[0]).read_text())
    if request["kind"] == "grid":
        measure_cells(request)
        return 0
    measure_here = MEASUREMENTS[request["kind"]].measure
    where = {"address": request["address"]} if "address" in signature(measure_here).parameters else {}
    with Communicator(topology="ring", timeout=TIMEOUT_S) as comm:
        measured = measure_here(comm, **request["arguments"], **where)
        record = {**measured, "settings": request["cluster"]}
        _publish(comm, record, request, request["path"])
    return 0


def measure_cells(request: Mapping[str, Any]) -> None:
    """Measure cells of one cluster, one after the other; collective."""
    cluster, library = Cluster(**request["cluster"]), request["library"]
    known = {one.name: one for one in of_library(library, cluster.nodes)}
    wanted = {name for asked in request["cells"] for name in asked["names"]}
    resources = Resources([one for name, one in known.items() if name in wanted], request["address"])
    for asked in request["cells"]:
        cell = Cell(cluster, asked["bytes"])
        advised = {"advised": measure_advice(resources.comm, cell.n)} if library == "openmpi" else {}
        record = measure_cell(resources, cell, [known[name] for name in asked["names"]], asked["budget_s"])
        _publish(resources.comm, {**record, **advised, "library": library}, request, asked["path"])
    resources.close()


def measure_cell(resources: Resources, cell: Cell, chosen: Sequence[Implementation], budget_s: float) -> Record:
    """Time implementations on vectors of one size; collective."""
    x, out = make_vectors(cell.n, resources.comm.rank)
    prepared = {one.name: resources.prepare(one, x, out) for one in chosen}
    slow = frozenset(one.name for one in chosen if one.predicted_s(cell) > SLOW_S)
    least = {one.name: one.least for one in chosen}
    timings = measure(
        prepared, resources.comm, lambda name, seconds: repeats_for(seconds, budget_s / len(chosen), least[name]), slow
    )
    return {"part": "cluster", "settings": cell.settings, "environment": environment(), "timings": timings}


def _publish(comm: Communicator, record: Record, request: Mapping[str, Any], path: str) -> None:
    if comm.rank == 0:
        record["environment"] |= request["environment"]
        write_record(Path(path), {**record, "links": request["links"]})


if __name__ == "__main__":
    sys.exit(main())
