"""Measure the time to the first result of a fresh process, with a warm and with an empty Numba cache."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apps.launch import mpi_environment, python_command, run
from apps.performance.part import Column, Part, Row, get, make_record
from apps.records import Record

SCRIPT = str(Path(__file__).with_name("first_result.py"))
LONGEST_S = 600.0
TARGET_S = "≤ 2"


def first_result(n_ranks: int | None, env: Mapping[str, str]) -> dict[str, float]:
    """Run it once: seconds since the start of the process at the end of each phase, in order."""
    status, output = run(python_command(n_ranks, [SCRIPT]), env, timeout_s=LONGEST_S)
    line = next((line for line in output.splitlines() if line.startswith("{")), None)
    if status or line is None:
        raise RuntimeError(f"{SCRIPT} on {n_ranks or 1} ranks ended with status {status}: {output.strip()}")
    found: dict[str, float] = json.loads(line)
    return found


def measure(rank_counts: Sequence[int | None], repeats: int, with_empty_cache: bool) -> Record:
    """Start fresh processes on so many ranks (None: without mpirun); with an empty cache once, which takes a minute."""
    env = mpi_environment()
    plain = {key: value for key, value in env.items() if key not in ("OMPI_MCA_pml", "OMPI_MCA_btl")}
    starts: list[tuple[str, int | None, Mapping[str, str]]] = []
    for ranks in rank_counts:
        starts.append((f"{ranks} ranks, `slurm/env.sh`" if ranks else "without mpirun, `slurm/env.sh`", ranks, env))
        starts.append((f"{ranks} ranks, no transport named" if ranks else "without mpirun", ranks, plain))
    first_result(None, env)  # fills the cache of a fresh clone
    rows: list[Row] = [
        {"start": start, "target": TARGET_S, "runs": [first_result(ranks, chosen) for _ in range(repeats)]}
        for start, ranks, chosen in starts
    ]
    if with_empty_cache:
        with tempfile.TemporaryDirectory() as cache:
            runs = [first_result(rank_counts[-1], env | {"NUMBA_CACHE_DIR": cache})]
        rows.append({"start": f"{rank_counts[-1] or 1} ranks, empty cache", "target": "", "runs": runs})
    return make_record(rows, n=1_000_000, repeats=repeats, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))


def _ends(row: Row) -> NDArray[np.float64]:
    """Seconds since the start: 0, and the end of each phase."""
    return np.array([[0.0, *run.values()] for run in row["runs"]])


def _total(row: Row) -> str:
    total = _ends(row)[:, -1]
    return f"{np.median(total):.2f} ({total.min():.2f} to {total.max():.2f})"


def _columns(record: Record) -> Sequence[Column]:
    def spent(phase: int) -> Callable[[Row], str]:
        return lambda row: f"{np.median(np.diff(_ends(row), axis=1)[:, phase]):.2f}"

    phases = record["rows"][0]["runs"][0]
    return (
        ("fresh process", get("start")),
        *((f"{phase}, s", spent(number)) for number, phase in enumerate(phases)),
        ("median (range), s", _total),
        ("target", get("target")),
    )


PART = Part(
    "startup",
    "Time to the first result of a fresh process.",
    measure,
    _columns,
    quick={"rank_counts": (None,), "repeats": 1, "with_empty_cache": False},
    full={"rank_counts": (None, 2, 4), "repeats": 9, "with_empty_cache": True},
)

if __name__ == "__main__":
    sys.exit(PART.main())
