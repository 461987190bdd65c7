"""Many jobs of random ranks, methods, topologies and lengths, whose ranks are killed in random phases."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from apps.chaos.case import Case
from apps.chaos.job import Launcher
from apps.chaos.judge import Verdict, judge
from apps.environment import environment
from apps.records import Record, write_record

PATIENCE_S = 150.0
KEPT, SLOWEST = 40, 5  # failures and kills in a record


def run_case(case: Case, launcher: Launcher, patience_s: float = PATIENCE_S) -> Verdict:
    """Run a case, and judge it; once more if none of its ranks has started."""
    verdict = _run_once(case, launcher, patience_s)
    return _run_once(case, launcher, patience_s) if verdict.problem == "start" else verdict


def _run_once(case: Case, launcher: Launcher, patience_s: float) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="mpicomp-chaos-") as scratch:
        folder = Path(scratch)
        request = folder / "case.json"
        write_record(request, case.record())
        ended = launcher.run(case.ranks, [str(request), scratch], folder, patience_s)
    return judge(case, ended)


def campaign(
    draw: Callable[[int], Case], seeds: Iterable[int], kills: float, seconds: float, launcher: Launcher,
    report: Callable[[Verdict, Record], None],
) -> Record:  # fmt: skip
    """Run cases until so many ranks have been killed or the time is over.

    `report` is called with each verdict and a record of all verdicts so far; the last record is returned.
    """
    verdicts: list[Verdict] = []
    start, loads = time.monotonic(), [os.getloadavg()[0]]
    record = summary(verdicts, 0.0, loads)
    for seed in seeds:
        if record["tried"] >= kills or time.monotonic() - start > seconds:
            break
        verdicts.append(run_case(draw(seed), launcher))
        loads.append(os.getloadavg()[0])
        record = summary(verdicts, time.monotonic() - start, loads)
        report(verdicts[-1], record)
    return record


def summary(verdicts: Sequence[Verdict], seconds: float, loads: Sequence[float]) -> Record:
    """Return the counts, the percentiles and the failures of a campaign."""
    kills = [kill for verdict in verdicts for kill in verdict.kills]
    times = np.array([kill.seconds for kill in kills]) * 1e3
    lost = [kill.lost for kill in kills if kill.lost]
    failed = [verdict for verdict in verdicts if verdict.problem]
    tried = sum(len(verdict.case.killed) for verdict in verdicts)
    in_failed = sum(len(verdict.case.killed) for verdict in failed)

    def percentile(part: float) -> float:
        return float(np.percentile(times, part)) if times.size else float("nan")

    return {
        "jobs": len(verdicts),
        "seeds": [min(one.case.seed for one in verdicts), max(one.case.seed for one in verdicts)] if verdicts else [],
        "tried": tried,
        "survived": tried - in_failed,
        **{name: sum(one.problem == name for one in failed) for name in ("wrong", "hang", "error", "start")},
        "faults": Counter(str(fault.kind) for verdict in verdicts for fault in verdict.faults),
        "timed": len(kills),
        "p50_ms": percentile(50),
        "p99_ms": percentile(99),
        "max_ms": percentile(100),
        "slowest": [
            {"seconds": kill.seconds, "seed": verdict.case.seed, "fault": str(kill.fault)}
            for kill, verdict in sorted(
                ((kill, verdict) for verdict in verdicts for kill in verdict.kills),
                key=lambda one: -one[0].seconds,
            )[:SLOWEST]
        ],
        "repeated": sum(kill.repeated for kill in kills),
        "lost_median": float(np.median(lost)) if lost else 0.0,
        "minutes": seconds / 60,
        "loads": [float(np.median(loads)), max(loads)],
        "failures": [
            {"case": str(one.case), "problem": one.problem, "text": one.text[-4000:]} for one in failed[:KEPT]
        ],
        "environment": environment(),
    }


HEADINGS = (
    "kills tried", "survived", "wrong results", "hangs", "other errors", "p50 / p99 / max, ms", "steps repeated",
    "residual lost, median", "jobs", "load",
)  # fmt: skip


def table(record: Record) -> str:
    """Return a record as a table."""
    cells = (
        f"{record['tried']:,}", f"{record['survived']:,}", record["wrong"], record["hang"], record["error"],
        f"{record['p50_ms']:.0f} / {record['p99_ms']:.0f} / {record['max_ms']:.0f}",
        f"{record['repeated']:,}", f"{100 * record['lost_median']:.0f} %", f"{record['jobs']:,}",
        f"{record['loads'][0]:.1f}",
    )  # fmt: skip
    rule = " | ".join(["---:"] * len(cells))
    return f"| {' | '.join(HEADINGS)} |\n| {rule} |\n| {' | '.join(map(str, cells))} |"
