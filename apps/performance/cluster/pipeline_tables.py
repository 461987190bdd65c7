"""Tables of `pipeline`: throughput, times of a micro-batch, targets, and micro-batches alive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from apps.environment import describe
from apps.performance.cluster.driver import ClusterMeasurement
from apps.performance.cluster.pipeline import (
    ALIVE_MICRO_BATCHES,
    DELTAS,
    DIRECT,
    FP32,
    METHODS,
    RATIO,
    SCHEDULES,
    STAGES,
    computing_s,
    jobs,
    measure_here,
    message_bytes,
    way_s,
)
from apps.performance.cluster.ratios import payload_rate
from apps.performance.cluster.tables import NOTHING
from apps.performance.cluster.targets import COLUMNS, Row
from apps.performance.part import MS, Column, format_seconds, get, table
from apps.records import Record
from mpicomp.pipeline.schedule import schedule as schedule_of
from mpicomp.pipeline.simulate import Times, all_stages, simulate_time

EPOCHS = 10
"""Of a whole training, of which AQ-SGD sends the first in float32."""
LEAST_OVER_FP32, MOST_BEHIND_DIRECT = 3.0, 0.15
SHOWN = (FP32, DELTAS[-1])
"""Methods whose messages are shown; the second is the one of the paper's Table 3."""


def render(records: Sequence[Record]) -> str:
    """All tables."""
    if not records:
        return NOTHING
    ordered = sorted(records, key=payload_rate, reverse=True)
    parts = [f"**Sequences a second, {schedule}**\n\n{_throughput(ordered, schedule)}" for schedule in SCHEDULES]
    parts.append(f"**A micro-batch, ms**\n\n{_micro_batches(ordered)}")
    near = min(ordered, key=lambda record: abs(math.log(ratio(record) / RATIO)))
    where = f"at {near['settings']['rate']}, where messages take {ratio(near):.2f} times as long as computing"
    parts.append(f"**Targets {where}**\n\n{table(COLUMNS, [*judge(near)])}")
    parts.append(f"**Micro-batches alive, of {ALIVE_MICRO_BATCHES}**\n\n{_alive(ordered)}")
    first = ordered[0]
    load = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in first["load"].items())
    note = f"{first['parameters']:,} parameters on {STAGES} stages; {load}. {describe(first['environment'])}."
    return "\n\n".join(parts) + f"\n\n<sub>{note}</sub>"


def ratio(record: Record) -> float:
    """Return the time of float32's messages, relative to computing a micro-batch."""
    return _wire_s(record, message_bytes(record, FP32)) / computing_s(record)


def judge(record: Record) -> Iterator[Row]:
    """AQ-SGD against float32 and DirectQ, as medians of rounds."""
    for schedule in SCHEDULES:
        times = _times(record, schedule)
        for deltas, direct in zip(DELTAS, DIRECT, strict=True):
            over = float(np.median(times[FP32] / times[deltas]))
            expected = simulated_s(record, schedule, FP32) / simulated_s(record, schedule, deltas)
            yield Row(
                f"{deltas} over {FP32}, {schedule}", f"{over:.2f} ({expected:.2f} simulated)",
                f"≥ {LEAST_OVER_FP32:g}", over >= LEAST_OVER_FP32,
            )  # fmt: skip
            behind = 1 - float(np.median(times[direct] / times[deltas]))
            yield Row(
                f"{deltas} slower than {direct}, {schedule}", f"{behind:.1%}", f"≤ {MOST_BEHIND_DIRECT:.0%}",
                behind <= MOST_BEHIND_DIRECT,
            )  # fmt: skip


def simulated_s(record: Record, schedule: str, name: str) -> float:
    """Simulate a step from the times of a micro-batch; half of the codec belongs to each way."""
    coded = record["codecs"][name]
    times = Times(
        forward=way_s(record, "forward") + coded["seconds"] / 2,
        backward=way_s(record, "backward") + coded["seconds"] / 2,
        forward_wire=_wire_s(record, coded["forward_bytes"]),
        backward_wire=_wire_s(record, coded["backward_bytes"]),
    )
    stages = all_stages(schedule_of(schedule), STAGES, record["load"]["micro_batches"])
    return float(simulate_time(stages, times).seconds)


def whole_training(first_s: float, later_s: float) -> float:
    """Seconds a step, mean over `EPOCHS` of which the first takes another time a step than the others."""
    return (first_s + (EPOCHS - 1) * later_s) / EPOCHS


def _throughput(records: Sequence[Record], schedule: str) -> str:
    last = f"messages over computing, {FP32}"
    cells = {
        record["settings"]["rate"]: _rates(record, schedule) | {last: f"{ratio(record):.2f}"} for record in records
    }
    names = [*METHODS, *(f"{name}, {EPOCHS} epochs" for name in DELTAS), last]
    rows = [{"method": name, **{rate: mine[name] for rate, mine in cells.items()}} for name in names]
    return table([(column, get(column)) for column in rows[0]], rows)


def _rates(record: Record, schedule: str) -> dict[str, str]:
    """Sequences a second by method, and how many times those of float32."""
    seconds = {name: float(np.median(times)) for name, times in _times(record, schedule).items()}
    seconds |= {f"{name}, {EPOCHS} epochs": whole_training(seconds[FP32], seconds[name]) for name in DELTAS}
    return {name: throughput(record["batch"], one, seconds[FP32]) for name, one in seconds.items()}


def throughput(batch: int, seconds: float, reference_s: float) -> str:
    """Sequences a second of a step that takes so long, and how many times those of another."""
    return f"{batch / seconds:.3g} ({reference_s / seconds:.2f}×)"


def _micro_batches(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        for name in SHOWN:
            coded = record["codecs"][name]
            rows.append(
                {"rate": record["settings"]["rate"], "method": name, "codec": format_seconds(coded["seconds"], MS)}
            )
            for way in ("forward", "backward"):
                rows[-1] |= {f"{way} computing": format_seconds(way_s(record, way), MS)}
                rows[-1] |= {f"{way} message": format_seconds(_wire_s(record, coded[f"{way}_bytes"]), MS)}
    return table(MICRO_BATCH, rows)


def _alive(records: Sequence[Record]) -> str:
    """The most of all records."""
    rows = []
    for schedule in SCHEDULES:
        most = np.max([record["alive"][schedule] for record in records], axis=0).tolist()
        rows.append({"schedule": schedule, **{f"stage {stage}": str(alive) for stage, alive in enumerate(most)}})
    return table([(column, get(column)) for column in rows[0]], rows)


def _times(record: Record, schedule: str) -> Mapping[str, Any]:
    return {row["method"]: np.array(row["times_s"]) for row in record["rows"] if row["schedule"] == schedule}


def _wire_s(record: Record, nbytes: float) -> float:
    """Return the time of the slowest link for so many bytes, by its measured rate."""
    return 8 * nbytes / payload_rate(record)


MICRO_BATCH: Sequence[Column] = (
    ("links", get("rate")),
    ("method", get("method")),
    *((name, get(name)) for name in ("forward computing", "forward message", "backward computing", "backward message")),
    ("codec of a stage", get("codec")),
)


MEASUREMENT = ClusterMeasurement("pipeline", jobs, measure_here, render)
