"""Users' training loops whose ranks are killed at random moments, in any part of a step or of a method's start."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.chaos.job import Ended, Launcher
from apps.chaos.lines import LineReader
from apps.environment import environment
from apps.records import Record

KINDS = ("numpy", "optimizer", "ddp", "per-node", "islands", "one-bit-adam")
MOST_RANKS, SECONDS, PATIENCE_S, POLL_S = 5, 2.0, 150.0, 0.01


@dataclass(frozen=True)
class LoopCase:
    """A job of one kind of loop; `moments` has the ranks to kill, with the seconds after the start of all ranks."""

    seed: int
    kind: str
    ranks: int
    moments: tuple[tuple[float, int], ...]

    @classmethod
    def draw(cls, seed: int) -> LoopCase:
        """Return the case of a seed."""
        draws = random.Random(seed)
        ranks = draws.randint(2, MOST_RANKS)
        dying = draws.sample(range(ranks), draws.randint(1, ranks - 1))
        moments = sorted((draws.uniform(0.0, SECONDS), rank) for rank in dying)
        return cls(seed, KINDS[seed % len(KINDS)], ranks, tuple(moments))


def run_case(case: LoopCase, launcher: Launcher) -> tuple[str, list[int]]:
    """Run a case; return a text that describes the fault, empty without a fault, and the ranks that were killed."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-chaos-") as scratch:
        folder, killed, over = Path(scratch), list[int](), threading.Event()
        killer = threading.Thread(target=_kill, args=(case, folder, killed, over), daemon=True)
        killer.start()
        ended = launcher.run(case.ranks, [case.kind, str(SECONDS), scratch], folder, PATIENCE_S)
        over.set()
        killer.join()
        return _problem(case, ended, killed), killed


def _kill(case: LoopCase, folder: Path, killed: list[int], over: threading.Event) -> None:
    reader = LineReader(folder)
    while len(reader.processes) < case.ranks:
        if over.wait(POLL_S):
            return
        reader.read()
    start = time.monotonic()
    for moment, rank in case.moments:
        if over.wait(max(0.0, start + moment - time.monotonic())):
            return
        if not any(row["kind"] == "end" for one, row in reader.read() if one == rank):
            with contextlib.suppress(ProcessLookupError):
                os.kill(reader.processes[rank], signal.SIGKILL)
                killed.append(rank)


def _problem(case: LoopCase, ended: Ended, killed: list[int]) -> str:
    if ended.status is None:
        return f"hang\n{ended.output}"
    survivors = [rank for rank in range(case.ranks) if rank not in killed]
    left = [rank for rank in survivors if not any(row["kind"] == "end" for row in ended.rows.get(rank, []))]
    if ended.status or left:
        return f"error: status {ended.status}, no end of ranks {left}\n{ended.output}"
    steps = {rank: [row for row in rows if row["kind"] == "step"] for rank, rows in ended.rows.items()}
    longest = max(steps.values(), key=len)
    for rank, rows in steps.items():
        if rank in survivors and len(rows) != len(longest):
            return f"wrong: rank {rank} made {len(rows)} of {len(longest)} steps"
        for number, (row, other) in enumerate(zip(rows, longest, strict=False)):
            if row["digest"] != other["digest"] or row["in_sum"] != other["in_sum"]:
                return f"wrong: step {number} of rank {rank}: {row} and {other}"
            least, most = (sum(1 << member for member in row[name]) for name in ("members", "before"))
            if row["in_sum"] & least != least or row["in_sum"] & ~most:
                return f"wrong: step {number} of rank {rank} sums the ranks of {row['in_sum']:b}: {row}"
    return ""


def campaign(seeds: Iterable[int], kills: int, seconds: float, launcher: Launcher, report: Any) -> Record:
    """Run cases until so many ranks have been killed or the time is over; `report` is called with each problem."""
    start, loads, failures = time.monotonic(), [os.getloadavg()[0]], list[dict[str, str]]()
    tried, jobs, problems, first = Counter[str](), 0, Counter[str](), None
    for seed in seeds:
        if tried.total() >= kills or time.monotonic() - start > seconds:
            break
        case = LoopCase.draw(seed)
        problem, killed = run_case(case, launcher)
        jobs, first = jobs + 1, seed if first is None else first
        tried[case.kind] += len(killed)
        loads.append(os.getloadavg()[0])
        if problem:
            problems[problem.split()[0].rstrip(":")] += 1
            failures.append({"case": str(case), "text": problem[-4000:]})
            report(f"{case}\n{problem}")
    return {
        "jobs": jobs, "first_seed": first, "kills": tried.total(), "by_loop": dict(sorted(tried.items())),
        "wrong": problems["wrong"], "hangs": problems["hang"], "errors": problems["error"], "failures": failures,
        "minutes": (time.monotonic() - start) / 60, "loads": [sorted(loads)[len(loads) // 2], max(loads)],
        "environment": environment(),
    }  # fmt: skip
