"""Markdown of the records; a table whose cells are not measured says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apps.environment import describe
from apps.performance.cluster import ratios
from apps.performance.cluster.grid import RATES, size_text
from apps.performance.cluster.implementations import (
    DENSE_RING,
    GLOO,
    MARSIT_RING,
    MPI_DEFAULT,
    MPICH_DEFAULT,
    ONE_BIT,
    ONE_BIT_RING,
)
from apps.performance.cluster.records import IN_MPICH, cluster_of, in_order
from apps.performance.part import MS, STAGES, Column, both, format_seconds, in_unit, table
from apps.records import Record
from collectives.cost.rate import Rate

FULL = 4  # nodes that all rates and sizes are measured with
SHOWN_BYTES = (16_000_000, 100_000_000)
TOPOLOGY_BYTES = (1_000_000, *SHOWN_BYTES)
BOUND_FROM = 1_000_000  # bytes; below, latency is most of the time
NOTHING, ABSENT = "Not measured yet.", "–"
COSTLY = (
    *(f"one-bit {name}" for name in ONE_BIT),
    MARSIT_RING,
    "Marsit torus",
    DENSE_RING,
    MPI_DEFAULT,
    "MPI ring",
)
"""Implementations whose cost is shown; with them the best of Open MPI, MPICH and Gloo."""


def tables(records: Sequence[Record]) -> dict[str, str]:
    """All tables by the name of their place in the document."""
    ordered = in_order(records)
    full = [record for record in ordered if record["settings"]["nodes"] == FULL]
    others = [record for record in ordered if record not in full or _links(record) not in RATES]
    topologies = [record for record in ordered if record["settings"]["bytes"] in TOPOLOGY_BYTES]
    mpich = [record for record in ordered if MPICH_DEFAULT in record["timings"]]
    bounded = [
        record
        for record in ordered
        if record["settings"]["between"] == "none"
        and record["settings"]["bytes"] >= BOUND_FROM
        and DENSE_RING in record["timings"]
    ]
    return {
        "cluster-sizes": _by_size(full),
        "cluster-rates": _by_rate(full),
        "cluster-nodes": _table((*PLACE, *COMPARED), others),
        "cluster-topologies": _table(
            (*PLACE, *(make_time_column(f"one-bit {name}", name) for name in ONE_BIT)), topologies
        ),
        "cluster-mpich": _table(MPICH, mpich),
        "cluster-bound": _table(BOUND, bounded),
        "cluster-cost": _cost(full),
        "cluster-left-out": _describe_left_out(ordered),
    }


def overlap_table(records: Sequence[Record]) -> str:
    """The table of the overlaps."""
    return _table(OVERLAP, sorted(records, key=lambda one: (one["settings"]["nodes"], ratios.payload_rate(one))))


def _by_size(records: Sequence[Record]) -> str:
    found = []
    for rate in dict.fromkeys(map(_links, records)):
        rows = [record for record in records if _links(record) == rate]
        found.append(f"**{FULL} nodes, {rate}**\n\n" + table((SIZE, *COMPARED), rows))
    return _with_footer(found, records)


def _by_rate(records: Sequence[Record]) -> str:
    found = []
    for nbytes in SHOWN_BYTES:
        rows = [record for record in records if record["settings"]["bytes"] == nbytes]
        if rows:
            found.append(f"**{FULL} nodes, {size_text(nbytes)}**\n\n" + table((LINKS, PAYLOAD, *COMPARED), rows))
    return _with_footer(found, records)


def _cost(records: Sequence[Record]) -> str:
    shown = [record for record in records if record["settings"]["bytes"] == max(SHOWN_BYTES)]
    found = []
    for record in shown:
        best = ratios.best_mpi(record)
        names = dict.fromkeys((*COSTLY, *(best[:1] if best else ()), MPICH_DEFAULT, GLOO))
        rows = [
            record["timings"][name] | {"name": f"{name} (best of Open MPI)" if best and name == best[0] else name}
            for name in names
            if name in record["timings"]
        ]
        heading = f"**{FULL} nodes, {_links(record)}, {size_text(record['settings']['bytes'])}**"
        found.append(f"{heading}\n\n{table(COST, rows)}")
    return _with_footer(found, shown)


def _describe_left_out(records: Sequence[Record]) -> str:
    if not records:
        return NOTHING
    rows = []
    for record in records:
        reasons: dict[str, list[str]] = {}
        for name, why in record["left_out"].items():
            reasons.setdefault(why.partition(":")[0], []).append(name)
        rows += [record | {"names": ", ".join(names), "why": why} for why, names in reasons.items()]
    columns = (*PLACE, ("all-reduces", lambda row: row["names"]), ("why", lambda row: row["why"]))
    return table(columns, rows) if rows else "Nothing was left out."


def format_hidden(record: Record) -> str:
    """The overlap as a median over jobs, and the range of theirs."""
    each = record["overlaps"]
    return f"{record['overlap']:.0%} ({100 * min(each):.0f} to {max(each):.0%})"


def format_timing(row: dict[str, Any]) -> str:
    """Milliseconds: median, minimum, and processor time of a rank."""
    return f"{both(row, MS)} / {format_seconds(row['cpu_s'], MS)}"


def time_text(record: Record, name: str) -> str:
    """An implementation's `format_timing` in a cell."""
    return format_timing(record["timings"][name]) if name in record["timings"] else ABSENT


def make_time_column(name: str, heading: str = "") -> Column:
    """A column of times."""
    return f"{heading or name}, ms", lambda record: time_text(record, name)


def times(ratio: float | None) -> str:
    """Format a ratio: faster, or longer."""
    return ABSENT if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _links(record: Record) -> str:
    return cluster_of(record).links


def _size(record: Record) -> str:
    mark = " †" if ratios.bucket_share(record) > ratios.NOTEWORTHY else ""
    return size_text(record["settings"]["bytes"]) + mark


def _best(record: Record) -> str:
    found = ratios.best_mpi(record)
    return ABSENT if found is None else f"{time_text(record, found[0])} {found[0].removeprefix('MPI ')}"


def _bound(rate_of: Callable[[Record], float | None], heading: str) -> tuple[Column, Column]:
    """The bound at a rate, and how many times longer the dense ring takes."""

    def bound(record: Record) -> str:
        rate = rate_of(record)
        return ABSENT if rate is None else format_seconds(ratios.bound_s(record, rate), MS)

    return (
        (f"bound at {heading} rate, ms", bound),
        ("ring over it", lambda record: times(ratios.over_bound(record, rate_of(record)))),
    )


def _stage(stage: str) -> Column:
    return stage, lambda row: format_seconds(row["cost"][STAGES[stage]], MS) if row["cost"] else ""


def _megabytes(heading: str, field: str) -> Column:
    """Bytes that we count, or the kernel; we count none of what others send."""

    def cell(row: dict[str, Any]) -> str:
        found = row if field in row else row["cost"]
        return f"{found[field] / 1e6:.3g}" if found else ""

    return heading, cell


LINKS: Column = ("links", _links)
SIZE: Column = ("size", _size)
PAYLOAD: Column = ("payload measured", lambda record: str(Rate(round(ratios.payload_rate(record), -5))))
PLACE: Sequence[Column] = (("nodes", lambda record: str(record["settings"]["nodes"])), LINKS, SIZE)
COMPARED: Sequence[Column] = (
    *map(make_time_column, (ONE_BIT_RING, MARSIT_RING, DENSE_RING, MPI_DEFAULT)),
    ("best of Open MPI, ms", _best),
    make_time_column(GLOO),
    ("best dense", lambda record: (ratios.best_dense(record) or (ABSENT,))[0]),
    ("one-bit over it", lambda record: times(ratios.speedup(record, ONE_BIT_RING, ratios.BEST_DENSE))),
    ("Marsit over it", lambda record: times(ratios.speedup(record, MARSIT_RING, ratios.BEST_DENSE))),
    ("Marsit, K = 100, over it", lambda record: times(ratios.default_speedup(record))),
)
MPICH: Sequence[Column] = (
    *PLACE,
    make_time_column(MPICH_DEFAULT),
    make_time_column(DENSE_RING + IN_MPICH, "dense ring on MPICH"),
    make_time_column(DENSE_RING, "on Open MPI"),
    make_time_column(ONE_BIT_RING + IN_MPICH, "one-bit ring on MPICH"),
    make_time_column(ONE_BIT_RING, "on Open MPI"),
    ("one-bit over MPICH", lambda record: times(ratios.over_mpich(record))),
)
BOUND: Sequence[Column] = (
    *PLACE,
    PAYLOAD,
    make_time_column(DENSE_RING),
    *_bound(ratios.nominal_rate, "nominal"),
    *_bound(ratios.payload_rate, "measured"),
)
COST: Sequence[Column] = (
    ("all-reduce", lambda row: row["name"]),
    ("elapsed, ms", in_unit("elapsed_s", MS)),
    ("processor, ms", in_unit("cpu_s", MS)),
    *map(_stage, STAGES),
    _megabytes("MB sent", "bytes_sent"),
    _megabytes("by one", "bytes_sent_most"),
    _megabytes("MB on the wire", "wire_bytes"),
    _megabytes("by one", "wire_bytes_most"),
)
OVERLAP: Sequence[Column] = (
    *PLACE[:2],
    ("payload measured", lambda record: str(Rate(round(ratios.payload_rate(record), -6)))),
    ("wire alone, ms", in_unit("wire_s", MS)),
    ("compute alone, ms", in_unit("compute_s", MS)),
    ("both, ms", in_unit("both_s", MS)),
    ("overlap", format_hidden),
    ("exposed wait, ms", in_unit("exposed_s", MS)),
    ("moving, ms of processor", in_unit("moving_s", MS)),
)


def _table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    return _with_footer([table(columns, records)] if records else [], records)


def _with_footer(found: Sequence[str], records: Sequence[Record]) -> str:
    if not found:
        return NOTHING
    highest = {"load": max(record["environment"]["load"] for record in records)}
    note = (
        "† the links' token buckets spare the one-bit ring more than a tenth of its time. "
        if " †" in "".join(found)
        else ""
    )
    note += (
        f"Load: the highest before a job. {describe(records[0]['environment'] | highest)}.{describe_scaling(records)}"
    )
    return "\n\n".join(found) + f"\n\n<sub>{note}</sub>"


def describe_scaling(records: Sequence[Record]) -> str:
    """Describe the memory's rate for all processors relative to one, before the jobs."""
    found = [float(one) for record in records for one in record["environment"]["memory_scaling"]]
    ends = dict.fromkeys((f"{min(found):.1f}", f"{max(found):.1f}"))
    return f" All processors at once read memory {' to '.join(ends)} times as fast as one."
