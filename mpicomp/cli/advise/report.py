"""Report of ``mpicomp advise``, its choice between methods, and their learning records.

A learning record decides between methods with about equal predictions. mpicomp help choose has the same table, with the
source of each figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectives import TOPOLOGIES
from mpicomp import algorithms
from mpicomp.aggregator.arguments import expression
from mpicomp.aggregator.registration import REGISTERED, Grade, Learned
from mpicomp.algorithms import ALGORITHMS, Algorithm, Dense, algorithm

Record: TypeAlias = dict[str, Any]
Row: TypeAlias = dict[str, Any]
HEADING = f"{'method':<16}  {'topology':<26}  {'all-reduce':>12}  {'step':>12}  {'of dense':>9}  {'pays below':>14}"
LOCAL_STEPS = (10, 30)
"""Steps from one average of updates to the next that are predicted besides each step."""
CAUTION = "Compare accuracy with a dense run of your training before you rely on it."


def rows(record: Record, some: Sequence[Row]) -> list[str]:
    """Return lines of the table; the record needs the rows of dense sums alone."""
    dense_s = dense_step(record)
    return [_row(row, dense_s) for row in some]


def conclusion(record: Record) -> str:
    """Return the lines below the table; the advice comes last but for lines to copy."""
    choice = choose(record)
    passed = explain_passed_over(record, choice)
    reasons = ["", "Predicted to be faster, but passed over:", *(f"  {reason}" for reason in passed)] if passed else []
    code = ["", "To copy:", *(f"  {line}" for line in lines_to_copy(record, choice))]
    late = record.get("left_out")
    left = ["", f"Not measured within the time of --quick: {', '.join(late)}"] if late else []
    return "\n".join((*reasons, *left, *after_local_steps(record), "", advice(record), *code))


def heading(record: Record) -> list[str]:
    """Return the lines above the table, and its head."""
    network, count = record["network"], record["count"]
    link = f"{rate(network['bandwidth_bytes_s'])} and {duration(network['latency_s'])} between neighbours"
    if network["uplink_bytes_s"] is not None:
        link += (
            f"; groups of {network['group_size']} ranks share {rate(network['uplink_bytes_s'])} to the others, "
            f"{duration(network['between_latency_s'] or network['latency_s'])} away"
        )
    threads = f" of {record['threads']} threads" if record["threads"] > 1 else ""
    mb = count * np.dtype(record["dtype"]).itemsize / 1e6
    lines = [
        f"# {record['ranks']} ranks{threads}; measured on {record['hosts']} host{'s'[: record['hosts'] > 1]}; "
        f"{count} elements of {record['dtype']} ({mb:.4g} MB), {duration(record['compute_s'])} of computing a step",
        f"# network: {link}",
    ]
    if record["nodes"] is not None:
        nodes, n_ranks = record["nodes"], record["nodes"]["ranks"]
        seconds = nodes["call_s"] + count * nodes["element_s"]
        lines.append(
            f"# per node: {record['ranks'] // n_ranks} nodes of {n_ranks} ranks, which sum and gather the vector in "
            f"{duration(seconds)}"
        )
    if record["not_predicted"]:
        lines.append(f"# not predicted for so many ranks: {', '.join(record['not_predicted'])}")
    if record["mpi_s"] is not None:
        lines.append(f"# MPI's own all-reduce, measured: {duration(record['mpi_s'])}; below is predicted")
    return [*lines, HEADING]


def _row(row: Row, dense_s: float) -> str:
    even = row["break_even_bytes_s"]
    pays = "never" if even is None else "always" if math.isinf(even) else rate(even)
    return (
        f"{row['method']:<16}  {_route(row):<26}  {duration(row['seconds']):>12}  {duration(row['step_s']):>12}  "
        f"{dense_s / row['step_s']:>8.2f}x  {'-' if row['method'] == 'dense' else pays:>14}"
    )


def _route(row: Row) -> str:
    return f"{row['topology']}, per node" if row["per_node"] else str(row["topology"])


def advice(record: Record) -> str:
    """Return the advice in one or two sentences."""
    best, compress, dense_s = choose(record)
    name = f"{best['method']} over {_route(best)}"
    even, here = best["break_even_bytes_s"], record["network"]["bandwidth_bytes_s"]
    known = even is not None and not math.isinf(even)
    if compress:
        limit = f"; on links above {rate(even)} it would not pay" if known and even > here else ""
        return (
            f"Compress with {name}: a step takes {duration(best['step_s'])} instead of {duration(dense_s)}, "
            f"{dense_s / best['step_s']:.1f} times as fast{limit}. {CAUTION}"
        )
    text = (
        f"Do not compress: a step takes {duration(dense_s)} without, and {duration(best['step_s'])} with {name}, "
        "the fastest candidate"
    )
    if best["seconds"] < dense_s - record["compute_s"]:
        return f"{text}: the all-reduce is too small a part of it."
    if known and even < here:
        return f"{text}. It would pay on links below {rate(even)}."
    return f"{text}."


def after_local_steps(record: Record) -> list[str]:
    """Return lines with steps of local optimizers that average every H of them: exactly, and by each kind of method."""
    best: dict[type[Algorithm], Row] = {}
    for row in sorted(record["rows"], key=lambda row: float(row["seconds"])):
        name = row["method"]
        if name != "dense" and METHODS[name].synchronize == "updates" and LEARNING[name].grade <= Grade.PROMISING:
            best.setdefault(type(METHODS[name]), row)
    if not best:
        return []
    compute_s = record["compute_s"]
    seconds = {"exact means": dense_step(record) - compute_s}
    seconds |= {f"{row['method']} over {_route(row)}": row["seconds"] for row in best.values()}
    lines = [
        f"  every {every} steps: "
        + ", ".join(f"{duration(compute_s + one / every)} with {name}" for name, one in seconds.items())
        for every in LOCAL_STEPS
    ]
    return ["", "If the training bears local steps, a step takes, where updates are averaged", *lines]


def duration(seconds: float) -> str:
    """Format seconds with a suitable unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def rate(bytes_s: float) -> str:
    """Format bytes per second in bit/s with a suitable unit."""
    bits = 8 * bytes_s
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


# Learning records ----------------------------------------------------------------------------------------------------


LEARNING: Mapping[str, Learned] = {
    name: one.learned for form in REGISTERED.values() for name, one in form.advised.items()
}
METHODS: Mapping[str, Algorithm] = {"dense": algorithm("dense")} | {
    name: REGISTERED[method].kind(**one.options)
    for method in ALGORITHMS
    for name, one in REGISTERED[method].advised.items()
}
QUICK = tuple(name for name in METHODS if name == "dense" or LEARNING[name].grade <= Grade.PROMISING)
"""Methods of ``--quick``: those whose record is as good as that of dense sums."""
COMPARED = frozenset(name for name, learned in LEARNING.items() if learned.grade is Grade.COMPARED)
"""Methods for comparison, advised only if no others were requested."""


# Choice --------------------------------------------------------------------------------------------------------------


WORTH = 1.05
"""A step must be this many times as fast to justify the noise of compressing, or a worse learning record."""
ACCURACY = 1.2
"""Accuracy of predictions: all-reduces within this factor count as equally fast."""


class Choice(NamedTuple):
    """The best compressing way, whether to compress, and the seconds of a step without compression."""

    row: Row
    compress: bool
    dense_s: float

    @property
    def step_s(self) -> float:
        """Seconds of a step as advised."""
        return float(self.row["step_s"]) if self.compress else self.dense_s


def dense_step(record: Record) -> float:
    """Return the seconds of a step with the fastest dense sum, MPI's included."""
    found = [record["dense_s"], *(row["seconds"] for row in record["rows"] if row["method"] == "dense")]
    if record["mpi_s"] is not None:
        found.append(record["mpi_s"])
    return float(min(found) + record["compute_s"])


def choose(record: Record) -> Choice:
    """Choose the method with the best learning record among those about as fast as the fastest."""
    dense_s = dense_step(record)
    compressed = [row for row in record["rows"] if row["method"] != "dense"]
    # methods for comparison are chosen only if no others were requested
    eligible = [row for row in compressed if not row["compared"]] or compressed
    fastest = min(eligible, key=lambda row: float(row["step_s"]))
    worthy = [row for row in eligible if dense_s >= WORTH * row["step_s"]]
    as_fast = [row for row in worthy if _as_fast(fastest, row)] or [fastest]
    best = min(as_fast, key=lambda row: (LEARNING[row["method"]].grade, row["step_s"]))
    return Choice(best, bool(worthy), dense_s)


def _as_fast(fastest: Row, row: Row) -> bool:
    return bool(row["step_s"] < WORTH * fastest["step_s"] or row["seconds"] < ACCURACY * fastest["seconds"])


def explain_passed_over(record: Record, choice: Choice) -> list[str]:
    """Return a line for each method with a faster prediction: its topologies, and the reason against it."""
    faster: dict[str, list[Row]] = {}
    for row in record["rows"]:
        if row["method"] != "dense" and row["step_s"] < choice.step_s:
            faster.setdefault(row["method"], []).append(row)
    return [
        f"{method} over {', '.join(map(_route, rows))}: {_reason(method, rows, choice)}"
        for method, rows in faster.items()
    ]


def _reason(method: str, rows: list[Row], choice: Choice) -> str:
    learned, chosen = LEARNING[method], choice.row["method"]
    if learned.grade is Grade.COMPARED and not choice.row["compared"]:
        return f"it {learned.experience}, and is predicted for comparison only"
    less = f"a step is {1 - min(row['step_s'] for row in rows) / choice.step_s:.1%} shorter"
    if not choice.compress:
        return f"{less} than without, which is not worth the noise of compressing"
    return (
        f"{less}, too little to prefer it to {chosen}, which has learned better: "
        f"{chosen} {LEARNING[chosen].experience}, and {method} {learned.experience}"
    )


# Lines of a program --------------------------------------------------------------------------------------------------


def lines_to_copy(record: Record, choice: Choice) -> list[str]:
    """Return lines that use the advice with PyTorch, and as a comment the last line without it."""
    row = choice.row if choice.compress else _dense_row(record)
    method = METHODS[row["method"]] if choice.compress else Dense()
    topology = row["topology"]
    named = topology.partition(":")[0] in (*TOPOLOGIES, "mpi")  # a method's own route is not a topology
    kind = record["dtype"]
    dtype = "" if kind == "float32" else f', dtype="{kind}"'
    where = [f'topology="{topology}"'] if named else []
    if record["threads"] > 1:
        where.append(f"threads={record['threads']}")
    home = "mpicomp" if type(method).__name__ in algorithms.__all__ else type(method).__module__
    made = f"{home}.{expression(method)}"
    if row["per_node"]:
        made = f"mpicomp.PerNode({made})"
        if record["ranks_per_node"] is not None:
            where.append(f"ranks_per_node={record['ranks_per_node']}")
    return [
        *([] if home == "mpicomp" else [f"import {home}"]),
        "import mpicomp.torch",
        f"comm, method = mpicomp.Communicator({', '.join(where)}), {made}",
        "optimizer = mpicomp.torch.DistributedOptimizer(optimizer, method, comm, model.named_parameters())",
        f"# or, without PyTorch: aggregator = method.start(comm, {record['count']}{dtype})",
    ]


def _dense_row(record: Record) -> Row:
    """Return the row of the fastest dense sum."""
    found = [row for row in record["rows"] if row["method"] == "dense"]
    if record["mpi_s"] is not None:
        found.append({"topology": "mpi", "seconds": record["mpi_s"], "per_node": False})
    return min(found, key=lambda row: float(row["seconds"]))
