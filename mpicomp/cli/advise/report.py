"""What ``mpicomp advise`` prints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpicomp.cli.advise.choice import choose, passed_over
from mpicomp.cli.advise.code import lines_to_copy

HEADING = f"{'method':<16}  {'topology':<18}  {'all-reduce':>12}  {'step':>12}  {'of dense':>9}  {'pays below':>14}"
CAUTION = "Compare accuracy with a dense run of your training before you rely on it."


def text(record: dict[str, Any]) -> str:
    """The whole report of what `mpicomp.cli.advise.predictions` gives, and ``hosts``; the advice comes last."""
    choice = choose(record)
    table = [*_heading(record), *(_row(row, choice.dense_s) for row in record["rows"])]
    passed = passed_over(record, choice)
    reasons = ["", "Predicted to be faster, but passed over:", *(f"  {reason}" for reason in passed)] if passed else []
    code = ["", "To copy:", *(f"  {line}" for line in lines_to_copy(record, choice))]
    return "\n".join((*table, *reasons, "", advice(record), *code))


def _heading(record: dict[str, Any]) -> list[str]:
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
    if record["not_predicted"]:
        lines.append(f"# not predicted for so many ranks: {', '.join(record['not_predicted'])}")
    if record["mpi_s"] is not None:
        lines.append(f"# MPI's own all-reduce, measured: {duration(record['mpi_s'])}; below is predicted")
    return [*lines, HEADING]


def _row(row: dict[str, Any], dense_s: float) -> str:
    even = row["break_even_bytes_s"]
    pays = "never" if even is None else "always" if math.isinf(even) else rate(even)
    return (
        f"{row['method']:<16}  {row['topology']:<18}  {duration(row['seconds']):>12}  {duration(row['step_s']):>12}  "
        f"{dense_s / row['step_s']:>8.2f}x  {'-' if row['method'] == 'dense' else pays:>14}"
    )


def advice(record: dict[str, Any]) -> str:
    """One plain sentence."""
    best, compress, dense_s = choose(record)
    name = f"{best['method']} over {best['topology']}"
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


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def rate(bytes_s: float) -> str:
    """Bytes per second as network people say it."""
    bits = 8 * bytes_s
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
