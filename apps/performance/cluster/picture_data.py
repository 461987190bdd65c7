"""Data of the cluster's figures in the documentation: the parts of the records that are drawn, next to the figures.

The records themselves stay on the machine that measured them. From ``docs/figures/data/cluster.json`` anyone can draw
the figures again: ``python -m apps.figures``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apps.performance.cluster import ratios
from apps.performance.cluster.implementations import DENSE_RING, GLOO, MARSIT_RING, MPI_DEFAULT, ONE_BIT_RING
from apps.performance.cluster.plots import draw
from apps.performance.cluster.step_plots import draw_steps
from apps.performance.cluster.tables import FULL
from apps.performance.part import STAGES
from apps.records import Record, read_record

NAME = "cluster.json"
PARTS = ("grid", "overlap", "methods", "backward", "training")
DRAWN = (ONE_BIT_RING, MARSIT_RING, DENSE_RING, MPI_DEFAULT, GLOO)
"""Implementations that are drawn, besides the fastest of Open MPI's algorithms."""
MEASURED = "Records of python -m apps.performance.cluster"
Parts = Mapping[str, Sequence[Record]]


def condense(
    cells: Sequence[Record], overlaps: Sequence[Record], methods: Sequence[Record], backward: Sequence[Record],
    training: Sequence[Record],
) -> dict[str, list[Record]]:  # fmt: skip
    """Return the parts of full records that are drawn, by the names of `PARTS`; parts without records are left out."""
    full = (r for r in cells if r["settings"]["nodes"] == FULL and r["settings"]["between"] == "none")
    made = {
        "grid": [_cell(record) for record in full],
        "overlap": [
            _common(record) | {name: record[name] for name in ("n", "wire_s", "compute_s", "both_s", "overlap")}
            for record in overlaps
        ],
        "methods": [
            _common(record) | {
                "n": record["n"],
                "compute": {name: record["compute"][name] for name in ("median_s", "parameters", "batch")},
                "rows": {name: {"median_s": row["median_s"]} for name, row in record["rows"].items()},
            }
            for record in methods
        ],
        "backward": [
            _common(record) | {"n": record["n"], "rows": [
                {name: row[name] for name in ("method", "batch", "backward_s", "communication_s", "both_s")}
                for row in record["rows"]
            ]}
            for record in backward
        ],
        "training": list(training),
    }  # fmt: skip
    return {name: records for name, records in made.items() if records}


def draw_parts(parts: Parts, folder: Path) -> list[Path]:
    """Draw the figures of the parts that are there; returns the files written."""
    drawn = draw(parts.get("grid", ()), parts.get("overlap", ()), folder)
    steps = [parts.get(name, ()) for name in ("methods", "backward", "training")]
    return drawn + draw_steps(steps[0], steps[1], steps[2], folder)


def read(path: Path) -> dict[str, list[Record]]:
    """Read the parts of a file."""
    found = read_record(path, source=str)
    return {name: found[name] for name in PARTS if name in found}


def update(path: Path, parts: Parts) -> None:
    """Replace parts of a file; the others stay. Each record has a line of its own."""
    known = dict(read_record(path, source=str)) if path.exists() else {}
    stays = [name for name in PARTS if name in known and name not in parts]
    known["source"] = f"{MEASURED}; {', '.join(stays)}: {known['source']}" if stays else MEASURED
    known |= parts
    lines = [f'"source": {json.dumps(known["source"])}']
    for name in PARTS:
        if name in known:
            records = ",\n".join(json.dumps(record) for record in known[name])
            lines.append(f'"{name}": [\n{records}\n]')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _common(record: Record) -> Record:
    links = [{"bits_per_s": ratios.payload_rate(record)}]
    return {"settings": {name: record["settings"][name] for name in ("nodes", "rate", "between")}, "links": links}


def _cell(record: Record) -> Record:
    best = ratios.best_mpi(record)
    names = [*DRAWN, *([best[0]] if best and best[0] not in DRAWN else [])]
    return {
        "settings": record["settings"],
        "links": [{"bits_per_s": ratios.payload_rate(record)}],
        "flattered": ratios.bucket_share(record) > ratios.NOTEWORTHY,
        "timings": {name: _time_row(record["timings"][name]) for name in names if name in record["timings"]},
    }


def _time_row(timed: Mapping[str, Any]) -> dict[str, Any]:
    cost = timed["cost"]
    stages = None if cost is None else {field: cost[field] for field in STAGES.values()}
    return {"median_s": timed["median_s"], "elapsed_s": timed["elapsed_s"], "cost": stages}
