"""What the project set out to reach on the emulated cluster, beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from apps.performance.cluster.figures import best_mpi, nominal_rate, over_bound, payload_rate, speedup, speedups_by_job
from apps.performance.cluster.grid import TWO_LEVEL, Cell, Net
from apps.performance.cluster.predicted import predict
from apps.performance.cluster.records import cell_of
from apps.performance.cluster.tables import hidden, time_text
from apps.performance.cluster.ways import DENSE_RING, MARSIT_RING, MPI_DEFAULT, ONE_BIT_RING
from apps.performance.record import table
from apps.records import Record

N_BYTES = 100_000_000
TORUS = "one-bit torus"


@dataclass(frozen=True)
class Target:
    """A ratio to be reached.

    Attributes
    ----------
    nodes : int
    links, way, over : str
        `way`'s speed over `over`'s.
    least : float
    """

    nodes: int
    links: str
    way: str
    over: str
    least: float


TARGETS = (
    Target(4, "1gbit", ONE_BIT_RING, "best MPI", 28),
    Target(4, "1gbit", ONE_BIT_RING, DENSE_RING, 26),
    Target(4, "1gbit", MARSIT_RING, "best MPI", 23),
    Target(4, "10gbit", ONE_BIT_RING, MPI_DEFAULT, 11),
    Target(4, "10gbit", ONE_BIT_RING, "best MPI", 9),
    Target(4, "10gbit", MARSIT_RING, "best MPI", 6.5),
)
OVERLAP_FOUR, OVERLAP_TWO = 0.85, 0.75
COLUMNS = ("what", "measured", "target", "")
Row = tuple[str, ...]


def render(records: Sequence[Record]) -> str:
    """A table of ratios, the times they are made of and how many calls; what is not measured has no line."""
    by_cell = {cell_of(record): record for record in records}
    rows = [*_ratios(by_cell), *_bound(by_cell), *_torus(by_cell)]
    return _table((*COLUMNS, "times, ms", "timed calls"), rows)


def render_overlaps(overlaps: Sequence[Record]) -> str:
    """A table like `render`'s."""
    return _table(COLUMNS, [*_overlaps(overlaps)])


def _table(columns: Sequence[str], rows: Sequence[Row]) -> str:
    return table(columns, rows) if rows else "Not measured yet."


def _behind(record: Record, *ways: str) -> Row:
    """The times that a ratio is made of, and how often each way was called in each job."""
    calls = [" + ".join(map(str, record["ways"][way]["calls_per_job"])) for way in ways]
    return "; ".join(time_text(record, way) for way in ways), "; ".join(calls)


def _ratios(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    for target in TARGETS:
        record = by_cell.get(Cell(Net.parse(target.nodes, target.links), N_BYTES))
        reached = None if record is None else speedup(record, target.way, target.over)
        if record is not None and reached is not None:
            found = best_mpi(record)
            best = found[0] if target.over == "best MPI" and found is not None else None
            over = target.over if best is None else f"{target.over} ({best})"
            what = f"{target.way} over {over}, {target.nodes} nodes, {target.links}"
            each = ", ".join(f"{one:.1f}" for one in speedups_by_job(record, target.way, target.over))
            yield (
                what, f"{reached:.1f} ({each})", f"≥ {target.least:g}", _verdict(reached >= target.least),
                *_behind(record, target.way, best or target.over),
            )  # fmt: skip


def _bound(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    record = by_cell.get(Cell(Net(4, "1gbit"), N_BYTES))
    if record is not None:
        for what, rate in (("nominal rate", nominal_rate(record)), ("measured payload rate", payload_rate(record))):
            ratio = over_bound(record, rate)
            if ratio is not None:
                yield (
                    f"dense ring over the bound at the {what}", f"{ratio:.3f}", "≤ 1.08", _verdict(ratio <= 1.08),
                    *_behind(record, DENSE_RING),
                )  # fmt: skip


def _overlaps(overlaps: Sequence[Record]) -> Iterator[Row]:
    """Four nodes at 1 Gbit/s; two at the rate where wire and computing come nearest to each other."""

    def row(what: str, record: Record, least: float) -> Row:
        return f"overlap, {what}", hidden(record), f"≥ {least:.0%}", _verdict(record["overlap"] >= least)

    for record in overlaps:
        if record["settings"] == asdict(Net(4, "1gbit")):
            yield row("4 nodes, 1gbit", record, OVERLAP_FOUR)
    two = [record for record in overlaps if record["settings"]["nodes"] == 2]
    apart = {id(record): abs(math.log(record["wire_s"] / record["compute_s"])) for record in two}
    nearest = min(two, key=lambda record: apart[id(record)], default=None)
    if nearest is not None:
        ratio = nearest["wire_s"] / nearest["compute_s"]
        yield row(f"2 nodes, {nearest['settings']['rate']}, wire {ratio:.2f} of computing", nearest, OVERLAP_TWO)


def _torus(by_cell: dict[Cell, Record]) -> Iterator[Row]:
    cell = Cell(Net.parse(8, TWO_LEVEL), N_BYTES)
    record = by_cell.get(cell)
    ratio = None if record is None else speedup(record, TORUS, ONE_BIT_RING)
    advised = [one for other, one in by_cell.items() if other.net == cell.net and one.get("advised")]
    if record is not None and ratio is not None and advised:
        known = max(advised, key=lambda one: cell_of(one).nbytes)
        model = predict(known, ONE_BIT_RING, cell) / predict(known, TORUS, cell)
        yield (
            f"one-bit torus over ring, 8 nodes, {TWO_LEVEL}", f"{ratio:.2f}", f"{model:.2f} ± 20 % (the model)",
            _verdict(abs(ratio / model - 1) <= 0.2), *_behind(record, TORUS, ONE_BIT_RING),
        )  # fmt: skip


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"
