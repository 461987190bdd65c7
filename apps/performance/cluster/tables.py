"""Markdown of the records; a table whose cells are not measured says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from apps.emulator.rate import Rate
from apps.environment import describe
from apps.performance.cluster.figures import (
    NOTEWORTHY,
    best_mpi,
    bound_s,
    nominal_rate,
    over_bound,
    over_mpich,
    payload_rate,
    spared,
    speedup,
)
from apps.performance.cluster.grid import RATES, Net, size_text
from apps.performance.cluster.records import IN_MPICH, in_order
from apps.performance.cluster.ways import (
    DENSE_RING,
    GLOO,
    MARSIT_RING,
    MPI_DEFAULT,
    MPICH_DEFAULT,
    ONE_BIT,
    ONE_BIT_RING,
)
from apps.performance.record import both, scaled, table
from apps.records import Record

Cells = Callable[[Record], str]
"""Makes the cells of a column."""

MS = 1e-3
FULL = 4  # nodes that all rates and sizes are measured with
SHOWN_BYTES = (16_000_000, 100_000_000)
TOPOLOGY_BYTES = (1_000_000, *SHOWN_BYTES)
BOUND_FROM = 1_000_000  # bytes; below, the bound is no bound worth the name
NOTHING, ABSENT = "Not measured yet.", "–"
COSTLY = (
    *(f"one-bit {name}" for name in ONE_BIT),
    MARSIT_RING,
    "Marsit torus",
    DENSE_RING,
    MPI_DEFAULT,
    "MPI ring",
)
"""Ways whose cost is shown; with them the best of Open MPI, MPICH and Gloo."""
TIMED = (ONE_BIT_RING, MARSIT_RING, DENSE_RING, MPI_DEFAULT)
COMPARED = (
    *(f"{name}, ms" for name in TIMED),
    "best of Open MPI, ms",
    "Gloo, ms",
    "one-bit over best",
    "over dense ring",
    "Marsit over best",
)


def tables(records: Sequence[Record], overlaps: Sequence[Record]) -> dict[str, str]:
    """All tables by the name of their place in the document."""
    ordered = in_order(records)
    return {
        "cluster-sizes": _by_size(ordered),
        "cluster-rates": _by_rate(ordered),
        "cluster-nodes": _by_nodes(ordered),
        "cluster-topologies": _topologies(ordered),
        "cluster-mpich": _mpich(ordered),
        "cluster-bound": _bound(ordered),
        "cluster-cost": _cost(ordered),
        "cluster-overlap": _overlap(overlaps),
        "cluster-left-out": _left_out(ordered),
    }


def links(settings: dict[str, Any]) -> str:
    """What the links of a cell are called."""
    return Net(settings["nodes"], settings["rate"], settings["between"]).links


def _by_size(records: Sequence[Record]) -> str:
    full = [record for record in records if record["settings"]["nodes"] == FULL]
    found = []
    for rate in dict.fromkeys(links(record["settings"]) for record in full):
        rows = [record for record in full if links(record["settings"]) == rate]
        found.append(f"**{FULL} nodes, {rate}**\n\n" + _table(("size", *COMPARED), rows, _size, *_compared()))
    return _with_footer(found, full)


def _by_rate(records: Sequence[Record]) -> str:
    full = [record for record in records if record["settings"]["nodes"] == FULL]
    found = []
    for nbytes in SHOWN_BYTES:
        rows = [record for record in full if record["settings"]["bytes"] == nbytes]
        if rows:
            columns = ("links", "payload measured", *COMPARED)
            found.append(
                f"**{FULL} nodes, {size_text(nbytes)}**\n\n" + _table(columns, rows, _links, _payload, *_compared())
            )
    return _with_footer(found, full)


def _by_nodes(records: Sequence[Record]) -> str:
    columns = ("nodes", "links", "size", *COMPARED)
    wanted = [
        record for record in records if record["settings"]["nodes"] != FULL or links(record["settings"]) not in RATES
    ]
    return _with_footer([_table(columns, wanted, _nodes, _links, _size, *_compared())] if wanted else [], wanted)


def _topologies(records: Sequence[Record]) -> str:
    rows = [record for record in records if record["settings"]["bytes"] in TOPOLOGY_BYTES]
    cells: list[Cells] = [_nodes, _links, _size]
    cells += [_timed(f"one-bit {name}") for name in ONE_BIT]
    columns = ("nodes", "links", "size", *(f"{name}, ms" for name in ONE_BIT))
    return _with_footer([_table(columns, rows, *cells)] if rows else [], rows)


def _mpich(records: Sequence[Record]) -> str:
    rows = [record for record in records if MPICH_DEFAULT in record["ways"]]
    names = (MPICH_DEFAULT, DENSE_RING + IN_MPICH, DENSE_RING, ONE_BIT_RING + IN_MPICH, ONE_BIT_RING)
    cells: list[Cells] = [_nodes, _links, _size]
    cells += [_timed(name) for name in names]
    columns = (
        "nodes", "links", "size", "MPICH, ms", "dense ring on MPICH, ms", "on Open MPI, ms",
        "one-bit ring on MPICH, ms", "on Open MPI, ms", "one-bit over MPICH",
    )  # fmt: skip
    found = [_table(columns, rows, *cells, lambda record: _times(over_mpich(record)))] if rows else []
    return _with_footer(found, rows)


def _bound(records: Sequence[Record]) -> str:
    def ratio(record: Record, rate: float | None) -> str:
        return _times(over_bound(record, rate))

    def bound(record: Record, rate: float | None) -> str:
        return ABSENT if rate is None else scaled(bound_s(record, rate), MS)

    level = [record for record in records if record["settings"]["between"] == "none"]
    rows = [record for record in level if record["settings"]["bytes"] >= BOUND_FROM and DENSE_RING in record["ways"]]
    columns = (
        "nodes", "links", "size", "payload measured", "dense ring, ms", "bound at nominal rate, ms", "ring over it",
        "bound at measured rate, ms", "ring over it",
    )  # fmt: skip
    cells: list[Cells] = [
        _nodes,
        _links,
        _size,
        _payload,
        _timed(DENSE_RING),
        lambda record: bound(record, nominal_rate(record)),
        lambda record: ratio(record, nominal_rate(record)),
        lambda record: bound(record, payload_rate(record)),
        lambda record: ratio(record, payload_rate(record)),
    ]
    return _with_footer([_table(columns, rows, *cells)] if rows else [], rows)


def _cost(records: Sequence[Record]) -> str:
    columns = (
        "way",
        "elapsed, ms",
        "processor, ms",
        "encode",
        "merge",
        "decode",
        "wait",
        "MB sent",
        "by one",
        "MB on the wire",
        "by one",
    )
    found, used = [], []
    for record in records:
        settings = record["settings"]
        if settings["nodes"] == FULL and settings["bytes"] == max(SHOWN_BYTES):
            best = best_mpi(record)
            names = dict.fromkeys((*COSTLY, *(best[:1] if best else ()), MPICH_DEFAULT, GLOO))
            rows = [
                _costs(f"{name} (best of Open MPI)" if best and name == best[0] else name, record["ways"][name])
                for name in names
                if name in record["ways"]
            ]
            found.append(
                f"**{FULL} nodes, {links(settings)}, {size_text(settings['bytes'])}**\n\n" + table(columns, rows)
            )
            used.append(record)
    return _with_footer(found, used)


def _costs(name: str, timed: dict[str, Any]) -> tuple[str, ...]:
    cost = timed["cost"]
    parts = ("seconds_encoding", "seconds_merging", "seconds_decoding", "seconds_waiting")
    return (
        name,
        scaled(timed["elapsed_s"], MS),
        scaled(timed["cpu_s"], MS),
        *(scaled(cost[part], MS) if cost else "" for part in parts),
        *(f"{cost[part] / 1e6:.3g}" if cost else "" for part in ("bytes_sent", "bytes_sent_most")),
        *(f"{timed[part] / 1e6:.3g}" for part in ("wire_bytes", "wire_bytes_most")),
    )


def _overlap(records: Sequence[Record]) -> str:
    columns = (
        "nodes", "links", "payload measured", "wire alone, ms", "compute alone, ms", "together, ms", "overlap",
        "exposed wait, ms", "moving, ms of processor",
    )  # fmt: skip
    rows = [
        (
            str(record["settings"]["nodes"]),
            links(record["settings"]),
            str(Rate(round(payload_rate(record), -6))),
            *(scaled(record[f"{name}_s"], MS) for name in ("wire", "compute", "together")),
            hidden(record),
            scaled(record["exposed_s"], MS),
            scaled(record["moving_s"], MS) if "moving_s" in record else "",
        )
        for record in sorted(records, key=lambda one: (one["settings"]["nodes"], payload_rate(one)))
    ]
    return _with_footer([table(columns, rows)] if rows else [], records)


def hidden(record: Record) -> str:
    """The overlap as a median over jobs, and the range of theirs."""
    each = record.get("overlaps", [record["overlap"]])
    return f"{record['overlap']:.0%} ({100 * min(each):.0f} to {max(each):.0%})"


def _left_out(records: Sequence[Record]) -> str:
    if not records:
        return NOTHING
    rows = []
    for record in records:
        reasons: dict[str, list[str]] = {}
        for name, why in record["left_out"].items():
            reasons.setdefault(why.partition(":")[0], []).append(name)
        rows += [
            (*(cell(record) for cell in (_nodes, _links, _size)), ", ".join(names), why)
            for why, names in reasons.items()
        ]
    return table(("nodes", "links", "size", "ways", "why"), rows) if rows else "Nothing was left out."


def _compared() -> list[Cells]:
    def best(record: Record) -> str:
        found = best_mpi(record)
        return ABSENT if found is None else f"{time_text(record, found[0])} {found[0].removeprefix('MPI ')}"

    ratios = ((ONE_BIT_RING, "best MPI"), (ONE_BIT_RING, DENSE_RING), (MARSIT_RING, "best MPI"))
    return [*map(_timed, TIMED), best, _timed(GLOO), *(_ratio(way, over) for way, over in ratios)]


def _timed(way: str) -> Cells:
    return lambda record: time_text(record, way)


def _ratio(way: str, over: str) -> Cells:
    return lambda record: _times(speedup(record, way, over))


def _table(columns: Sequence[str], records: Sequence[Record], *cells: Cells) -> str:
    return table(columns, [tuple(cell(record) for cell in cells) for record in records])


def time_text(record: Record, way: str) -> str:
    """Milliseconds of a way: median, minimum, and processor time of a rank."""
    timed = record["ways"].get(way)
    return ABSENT if timed is None else f"{both(timed, MS)} / {scaled(timed['cpu_s'], MS)}"


def _times(ratio: float | None) -> str:
    return ABSENT if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}"


def _nodes(record: Record) -> str:
    return str(record["settings"]["nodes"])


def _links(record: Record) -> str:
    return links(record["settings"])


def _size(record: Record) -> str:
    mark = " †" if spared(record) > NOTEWORTHY else ""
    return size_text(record["settings"]["bytes"]) + mark


def _payload(record: Record) -> str:
    return str(Rate(round(payload_rate(record), -5)))


def _with_footer(found: Sequence[str], records: Sequence[Record]) -> str:
    if not found:
        return NOTHING
    loads = [record["environment"]["load"] for record in records]
    facts = records[0]["environment"] | {"load": max(loads)}
    note = (
        "† the links' token buckets spare the one-bit ring more than a tenth of its time. "
        if " †" in "".join(found)
        else ""
    )
    note += f"Load: the highest before a job. {describe(facts)}.{scaling(records)}"
    return "\n\n".join(found) + f"\n\n<sub>{note}</sub>"


def scaling(records: Sequence[Record]) -> str:
    """How much more memory gave to all processors than to one, before the jobs."""
    found = [float(one) for record in records for one in record["environment"].get("memory_scaling", ())]
    if not found:
        return ""
    ends = dict.fromkeys((f"{min(found):.1f}", f"{max(found):.1f}"))
    return f" All processors at once read memory {' to '.join(ends)} times as fast as one."
