"""What runs on the ranks: ``python -m apps.performance.cluster.job REQUEST``, a JSON file that `drive` writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import mpicomp
from apps.environment import environment
from apps.performance.cluster.grid import Cell, Net
from apps.performance.cluster.methods import measure_here as measure_methods
from apps.performance.cluster.overlap import measure_overlap
from apps.performance.cluster.predicted import measure_advice
from apps.performance.cluster.rounds import measure
from apps.performance.cluster.sides import Resources
from apps.performance.cluster.vectors import fill
from apps.performance.cluster.ways import SLOW_S, Way, of_library
from apps.records import Record, write_record
from collectives import Communicator
from collectives.memory import aligned_empty

ALONE: Mapping[str, tuple[str, Callable[[Communicator, dict[str, Any]], Record]]] = {
    "overlap": ("ring", lambda comm, request: measure_overlap(comm, request["n"], request["repeats"])),
    "methods": ("ring", lambda comm, request: measure_methods(comm, request["n"], request["repeats"])),
}
"""Jobs that have a cluster of their own: their topology, and what they measure."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the request says; rank 0 writes a record for each cell as soon as it has it."""
    mpicomp.install_abort_hook()
    arguments = sys.argv[1:] if argv is None else argv
    request = json.loads(Path(arguments[0]).read_text())
    net = Net(**request["net"])
    if request["library"] in ALONE:
        topology, measure_one = ALONE[request["library"]]
        with Communicator(topology=topology) as comm:
            record = measure_one(comm, request)
            record["environment"] |= request["environment"]
            _publish(comm, {**record, "links": request["links"], "settings": request["net"]}, request["path"])
        return 0
    known = {way.name: way for way in of_library(request["library"], net.nodes)}
    wanted = {name for asked in request["cells"] for name in asked["ways"]}
    resources = Resources([way for name, way in known.items() if name in wanted], request["address"])
    for asked in request["cells"]:
        cell = Cell(net, asked["bytes"])
        ways = [known[name] for name in asked["ways"]]
        advised = [measure_advice(resources.comm, cell.n)] if request["advise"] else []
        record = measure_cell(resources, cell, ways, asked["budget_s"]) | {"advised": advised}
        record["environment"] |= request["environment"]
        extra = {"library": request["library"], "links": request["links"]}
        _publish(resources.comm, {**record, **extra}, asked["path"])
    resources.close()
    return 0


def measure_cell(resources: Resources, cell: Cell, ways: Sequence[Way], budget_s: float) -> Record:
    """Time all ways on vectors of one size; collective."""
    comm = resources.comm
    x, out = aligned_empty(cell.n, np.float32), aligned_empty(cell.n, np.float32)
    fill(x, comm.rank)
    out[:] = 0
    sides = {way.name: resources.side(way, x, out) for way in ways}
    slow = {way.name for way in ways if way.predicted_s(cell) > SLOW_S}
    timed = measure(sides, comm, budget_s, {way.name: way.least for way in ways}, slow)
    return {"part": "cluster", "settings": cell.settings, "environment": environment(), "ways": timed}


def _publish(comm: Communicator, record: dict[str, Any], path: str) -> None:
    if comm.rank == 0:
        write_record(Path(path), record)


if __name__ == "__main__":
    sys.exit(main())
