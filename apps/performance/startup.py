"""Time to the first result of a fresh process, with a warm and with an empty Numba cache."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apps.environment import environment
from apps.launch import mpi_environment, python_command, run
from apps.performance.record import footer, parser, publish, table
from apps.records import Record

SCRIPT = str(Path(__file__).with_name("first_result.py"))
LONGEST_S = 600.0
TARGET_S = "≤ 2"


def first_result(n_ranks: int | None, env: Mapping[str, str]) -> dict[str, float]:
    """Run it once: seconds since the start of the process at the end of each phase, in order.

    Raises
    ------
    RuntimeError
        It failed; says what it printed.
    """
    status, output = run(python_command(n_ranks, [SCRIPT]), env, timeout_s=LONGEST_S)
    line = next((line for line in output.splitlines() if line.startswith("{")), None)
    if status or line is None:
        raise RuntimeError(f"{SCRIPT} on {n_ranks or 1} ranks ended with status {status}: {output.strip()}")
    found: dict[str, float] = json.loads(line)
    return found


def measure(rank_counts: Sequence[int | None], repeats: int, with_empty_cache: bool) -> Record:
    """Measure.

    Parameters
    ----------
    rank_counts : sequence of int or None
        None: without mpirun.
    repeats : int
        Fresh processes of each.
    with_empty_cache : bool
        Compile everything once more too, which takes a minute.
    """
    env = mpi_environment()
    plain = {key: value for key, value in env.items() if key not in ("OMPI_MCA_pml", "OMPI_MCA_btl")}
    ways: list[tuple[str, int | None, Mapping[str, str]]] = []
    for ranks in rank_counts:
        ways.append((f"{ranks} ranks, `slurm/env.sh`" if ranks else "without mpirun, `slurm/env.sh`", ranks, env))
        ways.append((f"{ranks} ranks, no transport named" if ranks else "without mpirun", ranks, plain))
    first_result(None, env)  # fills the cache of a fresh clone
    rows: list[dict[str, Any]] = []
    for way, ranks, chosen in ways:
        runs = [first_result(ranks, chosen) for _ in range(repeats)]
        rows.append({"way": way, "target": TARGET_S, "runs": runs})
    if with_empty_cache:
        with tempfile.TemporaryDirectory() as cache:
            runs = [first_result(rank_counts[-1], env | {"NUMBA_CACHE_DIR": cache})]
        rows.append({"way": f"{rank_counts[-1] or 1} ranks, empty cache", "target": "", "runs": runs})
    settings = {"n": 1_000_000, "repeats": repeats, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    return {"part": "startup", "settings": settings, "environment": environment(), "rows": rows}


def render(record: Record) -> str:
    """Markdown."""
    phases = list(record["rows"][0]["runs"][0])
    rows = []
    for row in record["rows"]:
        ends = np.array([[0.0, *one.values()] for one in row["runs"]])
        spent = np.median(np.diff(ends, axis=1), axis=0)
        total = ends[:, -1]
        rows.append(
            (
                row["way"],
                *(f"{seconds:.2f}" for seconds in spent),
                f"{np.median(total):.2f} ({total.min():.2f} to {total.max():.2f})",
                row["target"],
            )
        )
    columns = ("fresh process", *(f"{phase}, s" for phase in phases), "median (range), s", "target")
    return table(columns, rows) + footer(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    options = parser("startup", "Time to the first result of a fresh process.").parse_args(argv)
    record = measure((None,), 1, False) if options.quick else measure((None, 2, 4), 9, True)
    publish(record, render, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
