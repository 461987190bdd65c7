"""Report of ``mpicomp bench``: a table with the columns of nccl-tests and a few more, and JSON lines."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from mpicomp.cli.bench.measure import Measurement

Line: TypeAlias = dict[str, Any]
"""Fields of a line of JSON."""
COLUMNS = (
    ("size", "(B)", 11),
    ("count", "", 11),
    ("time", "(us)", 10),
    ("p99", "(us)", 10),
    ("algbw", "(GB/s)", 8),
    ("busbw", "(GB/s)", 8),
    ("sent/rank", "(B)", 11),
    ("messages", "", 8),
    ("bits/el", "", 7),
    ("baseline", "(us)", 10),
    ("speed-up", "", 8),
    ("check", "", 5),
)


def bits_per_element(bytes_sent_per_rank: float, count: int, ranks: int) -> float | None:
    """Return the bits of an element in each of the two phases, from the bytes handed to MPI; None for one rank."""
    # With b bits in the reduce phase and in the gather phase, a rank sends 2 b (M - 1)/M bits per element: 1.00 for
    # one-bit methods, 32.00 for float32.
    return 8 * bytes_sent_per_rank * ranks / (2 * count * (ranks - 1)) if ranks > 1 else None


def record(common: Line, count: int, measured: Measurement, verdict: str | None, dense: dict[str, float]) -> Line:
    """Return a line of JSON: the fields that all lines share, and those of a vector of `count` elements."""
    ranks, nbytes = common["ranks"], count * np.dtype(common["dtype"]).itemsize
    seconds, p99 = np.percentile(measured.seconds, (50, 99)).tolist()
    other, sent, bandwidth = measured.baseline_seconds, measured.cost["bytes_sent"], nbytes / seconds
    # `verdict` is the check's error, or ""; None: not checked. `dense` is empty, or for methods with full-precision
    # rounds has ``every``, the mean ``bytes`` that a rank sends in such a round, and the ``calls`` among those timed.
    return {
        **common,
        "count": count,
        "nbytes": nbytes,
        "seconds": seconds,
        "p99_seconds": p99,
        "min_seconds": float(measured.seconds.min()),
        "algbw_gb_s": bandwidth / 1e9,
        "busbw_gb_s": bandwidth * 2 * (ranks - 1) / ranks / 1e9,
        "bytes_sent_per_rank": sent,
        "bytes_sent_per_node": sent * ranks / len(common["nodes"]),
        "messages_per_rank": measured.cost["messages"],
        "bits_per_element": bits_per_element(sent, count, ranks),
        "bits_per_element_long_run": bits_per_element(_long_run(sent, measured.seconds.size, dense), count, ranks),
        "full_precision_calls": dense.get("calls", 0),
        **{
            f"{name}_seconds": measured.cost[f"seconds_{name}"]
            for name in ("encoding", "merging", "decoding", "waiting")
        },
        "baseline_seconds": None if other is None else float(np.median(other)),
        "baseline_p99_seconds": None if other is None else float(np.percentile(other, 99)),
        "baseline_min_seconds": None if other is None else float(other.min()),
        "speedup": None if other is None else float(np.median(other)) / seconds,
        "check": None if verdict is None else verdict or "ok",
    }


def _long_run(sent: float, calls: int, dense: dict[str, float]) -> float:
    """Return the bytes per call over a whole period of `every` calls."""
    if not dense or dense["calls"] == calls:
        return sent
    one_bit = (sent * calls - dense["bytes"] * dense["calls"]) / (calls - dense["calls"])
    return (dense["bytes"] + (dense["every"] - 1) * one_bit) / dense["every"]


def heading(common: Line) -> str:
    """Return the lines above the table."""
    options = ", ".join(f"{key}={value}" for key, value in common["options"].items())
    hosts = len(common["hosts"])
    lines = [
        f"# {common['algorithm']}{f' ({options})' if options else ''} over {common['topology']}, {common['dtype']}, "
        f"{common['ranks']} ranks on {hosts} host{'s'[: hosts > 1]}, {common['mpi_library']}",
        f"# time: median over {common['repeats']} calls of the slowest rank; baseline: {common['baseline']}, in turn",
    ]
    if common["per_node"] is not None:
        sizes = ", ".join(map(str, common["nodes"]))
        lines.append(f"# per node ({common['per_node']}): full precision within, the method between; ranks: {sizes}")
    if common["link"] is not None:
        lines.append(f"# links are emulated: {common['link']}")
    if common["device"] != "cpu":
        where = "encoded there" if common["encoded_on"] == common["device"] else "not encoded there"
        through_host = "; baseline: through the host's memory" if common["baseline"] == "mpi" else ""
        gpus, names = common["gpus"], ", ".join(common["gpu_names"])
        lines.append(f"# vectors on {gpus} GPU{'s'[: gpus > 1]} ({names}), {where}{through_host}")
    lines += ["  ".join(f"{row[which]:>{row[2]}}" for row in COLUMNS).rstrip() for which in (0, 1)]
    return "\n".join(lines)


def row(line: Line) -> str:
    """Return the row of the table for one vector length."""
    check = "-" if line["check"] is None else "ok" if line["check"] == "ok" else "WRONG"
    cells = (
        str(line["nbytes"]),
        str(line["count"]),
        _number(1e6 * line["seconds"]),
        _number(1e6 * line["p99_seconds"]),
        _number(line["algbw_gb_s"]),
        _number(line["busbw_gb_s"]),
        f"{line['bytes_sent_per_rank']:.0f}",
        f"{line['messages_per_rank']:.0f}",
        "-" if line["bits_per_element"] is None else f"{line['bits_per_element']:.2f}",
        "-" if line["baseline_seconds"] is None else _number(1e6 * line["baseline_seconds"]),
        "-" if line["speedup"] is None else f"{line['speedup']:.2f}x",
        check,
    )
    return "  ".join(f"{cell:>{column[2]}}" for cell, column in zip(cells, COLUMNS, strict=True))


def _number(value: float) -> str:
    digits = max(0, 3 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f}"


def failure(line: Line) -> list[str]:
    """Return the line below a row whose result is wrong; none below others."""
    return [] if line["check"] in (None, "ok") else [f"# WRONG: {line['check']}"]


def footing(lines: list[Line], every: int | None) -> list[str]:
    """Return the line below the table of a method with steps in full precision, of which few are among the calls."""
    long_run = [line["bits_per_element_long_run"] for line in lines]
    if every is None or every <= 1 or None in long_run:
        return []
    full, calls = (sum(line[name] for line in lines) for name in ("full_precision_calls", "repeats"))
    bits = " to ".join(dict.fromkeys(f"{bound:.2f}" for bound in (min(long_run), max(long_run))))
    timed = f"{full} of the {calls} timed calls {'was' if full == 1 else 'were'}"
    return [f"# every {every}th call is in full precision; {timed}; in the long run {bits} bits/el"]
