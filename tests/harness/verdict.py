"""Verdict of one rank on one test, and the agreement of all ranks on one verdict."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks that wait for a slow one must leave it the processor: they look often at first, and then less and less.
FIRST_POLL_S, LONGEST_POLL_S = 0.0002, 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rank's outcome of one test."""

    rank: int
    outcome: str  # "passed", "failed", "skipped", or "idle" outside the test's sub-communicator
    where: str = ""  # file and line of the failure: ranks that failed at one place are reported once
    summary: str = ""  # the exception, or why the test was skipped, in one line
    details: str = ""  # traceback and captured output, as pytest prints them


def allgather(comm: MPI.Intracomm, value: object, waiting: Callable[[float], None]) -> list[Any]:
    """Gather one picklable value from every rank without ever blocking inside MPI.

    Nothing else may use `comm`. `waiting` is called with the seconds waited so far until all ranks have come.
    """
    payload = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    counts = np.zeros(comm.size, dtype=np.int64)
    _poll(comm.Iallgather(np.array([payload.size], dtype=np.int64), counts), waiting)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    gathered = np.empty(offsets[-1], dtype=np.uint8)
    _poll(comm.Iallgatherv(payload, (gathered, (counts, offsets[:-1]))), waiting)
    return [pickle.loads(gathered[offsets[r] : offsets[r + 1]].tobytes()) for r in range(comm.size)]


def _poll(request: MPI.Request, waiting: Callable[[float], None]) -> None:
    started, pause_s = time.monotonic(), FIRST_POLL_S
    while not request.Test():
        waiting(time.monotonic() - started)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_POLL_S)


def judge(verdicts: Sequence[Verdict]) -> str | None:
    """Return the text of the job's failure, or None where the test passed on every rank that took part.

    A skipped test is a failure too: what a lane cannot run is deselected before (see ``tests/mpi/conftest.py``),
    so a skip means that a test silently stopped testing.
    """
    size = len(verdicts)
    failed = [v for v in verdicts if v.outcome == "failed"]
    if failed:
        first = failed[0]
        lines = [f"on {len(failed)} of {size} ranks; rank {first.rank} of {size}: {first.summary}"]
        lines += [f"  rank {v.rank} of {size}: {v.summary}" for v in failed[1:]]
        places: set[str] = set()
        for verdict in failed:
            if verdict.where not in places:
                places.add(verdict.where)
                lines += ["", f"--- rank {verdict.rank} of {size} ---", verdict.details]
        return "\n".join(lines)
    skipped = [v for v in verdicts if v.outcome == "skipped"]
    if skipped:
        ranks = ", ".join(str(v.rank) for v in skipped)
        return (
            f"skipped on rank {ranks} of {size} ({skipped[0].summary}): a lane runs all its tests; say with "
            "@pytest.mark.mpi(min_size=..., max_size=..., library=...) where this one cannot run"
        )
    return None
