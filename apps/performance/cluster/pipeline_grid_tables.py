"""Tables of `pipeline_grid`: throughput, the gain of each compression over the other, and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from apps.environment import describe
from apps.performance.cluster.driver import ClusterMeasurement
from apps.performance.cluster.pipeline_grid import (
    ACTIVATIONS,
    ADAM,
    DENSE,
    REPLICAS,
    SCHEDULE,
    SENT,
    STAGES,
    WAYS,
    jobs,
    measure_here,
)
from apps.performance.cluster.pipeline_tables import throughput
from apps.performance.cluster.ratios import payload_rate
from apps.performance.cluster.tables import NOTHING
from apps.performance.part import get, table
from apps.records import Record
from mpicomp.cli.timing import Seconds

PLAIN, DIRECTLY, COMPRESSED = ACTIVATIONS
BOTH = COMPRESSED, ADAM
COMPARED = {
    "neither compressed": (PLAIN, DENSE),
    "activations alone": (COMPRESSED, DENSE),
    "the model's gradients alone": (PLAIN, ADAM),
    f"{DIRECTLY} and {ADAM}": (DIRECTLY, ADAM),
}
"""What `BOTH` is compared with."""


def render(records: Sequence[Record]) -> str:
    """All tables."""
    if not records:
        return NOTHING
    ordered = sorted(records, key=payload_rate, reverse=True)
    first = ordered[0]
    parts = [
        f"**Sequences a second, {SCHEDULE}**\n\n{_throughput(ordered)}",
        f"**{' and '.join(BOTH)}: speed-up over others**\n\n{_compare(ordered)}",
        f"**MB that a node sends in a step, at most**\n\n{_describe_sent(first)}",
    ]
    load = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in first["load"].items())
    grid = f"{REPLICAS} replicas of {first['parameters']:,} parameters on {STAGES} stages"
    return "\n\n".join(parts) + f"\n\n<sub>{grid}; {load}. {describe(first['environment'])}.</sub>"


def _throughput(records: Sequence[Record]) -> str:
    cells = {record["settings"]["rate"]: _rates(record) for record in records}
    rows = [{**_heads(way), **{rate: mine[way] for rate, mine in cells.items()}} for way in WAYS]
    return table([(column, get(column)) for column in rows[0]], rows)


def _rates(record: Record) -> dict[tuple[str, str], str]:
    """Sequences a second of each way, and how many times those without any compression."""
    seconds = {way: float(np.median(times)) for way, times in _times(record).items()}
    return {way: throughput(record["batch"], one, seconds[PLAIN, DENSE]) for way, one in seconds.items()}


def _compare(records: Sequence[Record]) -> str:
    """Medians of rounds."""
    times = {record["settings"]["rate"]: _times(record) for record in records}
    rows = [
        {"over": name} | {rate: f"{np.median(mine[other] / mine[BOTH]):.2f}" for rate, mine in times.items()}
        for name, other in COMPARED.items()
    ]
    return table([(column, get(column)) for column in rows[0]], rows)


def _describe_sent(record: Record) -> str:
    rows = [
        _heads(_way(row)) | {name: f"{row['sent_bytes'][name] / 1e6:.3f}" for name in SENT} for row in record["rows"]
    ]
    return table([(column, get(column)) for column in rows[0]], rows)


def _heads(way: tuple[str, str]) -> dict[str, str]:
    return dict(zip(("activations as", "gradients as"), way, strict=True))


def _times(record: Record) -> Mapping[tuple[str, str], Seconds]:
    return {_way(row): np.array(row["times_s"]) for row in record["rows"]}


def _way(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["activations"], row["gradients"]


MEASUREMENT = ClusterMeasurement("pipeline-grid", jobs, measure_here, render)
