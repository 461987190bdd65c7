"""Targets of the project on the emulated cluster, next to the measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apps.performance.cluster.grid import TWO_LEVEL, Cell, Cluster
from apps.performance.cluster.implementations import DENSE_RING, MARSIT_RING, MPI_DEFAULT, ONE_BIT_RING
from apps.performance.cluster.predicted import predict
from apps.performance.cluster.ratios import (
    BEST_DENSE,
    best_dense,
    nominal_rate,
    over_bound,
    payload_rate,
    speedup,
    speedups_by_job,
)
from apps.performance.cluster.records import cell_of, cluster_of
from apps.performance.cluster.tables import NOTHING, format_hidden, time_text
from apps.performance.part import Column, table
from apps.records import Record

N_BYTES = 100_000_000
TORUS = "one-bit torus"


@dataclass(frozen=True)
class Target:
    """The least speed of the implementation `name` over that of `over`."""

    nodes: int
    links: str
    name: str
    over: str
    least: float


TARGETS = (
    Target(4, "1gbit", ONE_BIT_RING, BEST_DENSE, 28),
    Target(4, "1gbit", ONE_BIT_RING, DENSE_RING, 26),
    Target(4, "1gbit", MARSIT_RING, BEST_DENSE, 23),
    Target(4, "10gbit", ONE_BIT_RING, MPI_DEFAULT, 11),
    Target(4, "10gbit", ONE_BIT_RING, BEST_DENSE, 9),
    Target(4, "10gbit", MARSIT_RING, BEST_DENSE, 6.5),
)
OVERLAP_FOUR, OVERLAP_TWO = 0.85, 0.75
MOST_OVER_BOUND, MODEL_OFF = 1.08, 0.2


@dataclass(frozen=True)
class Row:
    """Return the measurement of a target: of a cell's record, from the times of the implementations `names`."""

    what: str
    measured: str
    target: str
    reached: bool
    record: Record | None = None
    names: tuple[str, ...] = ()


COLUMNS: Sequence[Column] = (
    ("quantity", lambda row: row.what),
    ("measured", lambda row: row.measured),
    ("target", lambda row: row.target),
    ("", lambda row: "reached" if row.reached else "**missed**"),
)
BEHIND: Sequence[Column] = (
    ("times, ms", lambda row: "; ".join(time_text(row.record, name) for name in row.names)),
    (
        "timed calls",
        lambda row: "; ".join(" + ".join(map(str, row.record["timings"][name]["calls_per_job"])) for name in row.names),
    ),
)


def render(records: Sequence[Record]) -> str:
    """A table of ratios, the times they are made of and how many calls; targets that were not measured have no line."""
    by_cell = {cell_of(record): record for record in records}
    rows = [*_ratios(by_cell), *_bound(by_cell), *_torus(by_cell)]
    return table((*COLUMNS, *BEHIND), rows) if rows else NOTHING


def render_overlaps(overlaps: Sequence[Record]) -> str:
    """A table like `render`'s."""
    rows = [*_overlaps(overlaps)]
    return table(COLUMNS, rows) if rows else NOTHING


def _ratios(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    for target in TARGETS:
        record = by_cell.get(Cell(Cluster.parse(target.nodes, target.links), N_BYTES))
        reached = None if record is None else speedup(record, target.name, target.over)
        if record is not None and reached is not None:
            best = best_dense(record)
            name = best[0] if target.over == BEST_DENSE and best is not None else target.over
            over = f"{BEST_DENSE} ({name})" if name != target.over else name
            each = ", ".join(f"{one:.1f}" for one in speedups_by_job(record, target.name, target.over))
            yield Row(
                f"{target.name} over {over}, {target.nodes} nodes, {target.links}", f"{reached:.1f} ({each})",
                f"≥ {target.least:g}", reached >= target.least, record, (target.name, name),
            )  # fmt: skip


def _bound(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    record = by_cell.get(Cell(Cluster(4, "1gbit"), N_BYTES))
    if record is not None:
        for what, rate in (("nominal rate", nominal_rate(record)), ("measured payload rate", payload_rate(record))):
            ratio = over_bound(record, rate)
            if ratio is not None:
                yield Row(
                    f"dense ring over the bound at the {what}", f"{ratio:.3f}", f"≤ {MOST_OVER_BOUND}",
                    ratio <= MOST_OVER_BOUND, record, (DENSE_RING,),
                )  # fmt: skip


def _overlaps(overlaps: Sequence[Record]) -> Iterator[Row]:
    """Four nodes at 1 Gbit/s; two at the rate where wire and computing come nearest to each other."""

    def row(what: str, record: Record, least: float) -> Row:
        return Row(f"overlap, {what}", format_hidden(record), f"≥ {least:.0%}", record["overlap"] >= least)

    for record in overlaps:
        if cluster_of(record) == Cluster(4, "1gbit"):
            yield row("4 nodes, 1gbit", record, OVERLAP_FOUR)
    two = [record for record in overlaps if record["settings"]["nodes"] == 2]
    if two:
        nearest = min(two, key=lambda record: abs(math.log(record["wire_s"] / record["compute_s"])))
        ratio = nearest["wire_s"] / nearest["compute_s"]
        yield row(f"2 nodes, {nearest['settings']['rate']}, wire {ratio:.2f} of computing", nearest, OVERLAP_TWO)


def _torus(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    cell = Cell(Cluster.parse(8, TWO_LEVEL), N_BYTES)
    record = by_cell.get(cell)
    ratio = None if record is None else speedup(record, TORUS, ONE_BIT_RING)
    advised = [one for other, one in by_cell.items() if other.cluster == cell.cluster and one["advised"]]
    if record is not None and ratio is not None and advised:
        known = max(advised, key=lambda one: cell_of(one).nbytes)
        model = predict(known, ONE_BIT_RING, cell) / predict(known, TORUS, cell)
        yield Row(
            f"one-bit torus over ring, 8 nodes, {TWO_LEVEL}", f"{ratio:.2f}",
            f"{model:.2f} ± {100 * MODEL_OFF:.0f} % (the model)", abs(ratio / model - 1) <= MODEL_OFF, record,
            (TORUS, ONE_BIT_RING),
        )  # fmt: skip
