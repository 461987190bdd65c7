"""Very many calls of mixed size and method, with deaths among them or without: memory and objects that stay behind."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apps.chaos.job import FAULT_TOLERANT, STACKS_S
from apps.chaos.running_job import RunningJob, make_folder
from apps.environment import environment
from apps.launch import find_mpirun, mpi_environment
from apps.records import Record, write_record
from mpicomp.algorithms import ALGORITHMS

POLL_S = 0.1
WATCHDOG_S = 300.0
LOOKS = 20
FIRST_DEATH, LAST_DEATH = 0.1, 0.9  # parts of the calls between which ranks die
# Between a fifth of the calls and the end. The flight recorder fills up with 2,000 calls, of a few objects each.
GROWTH_MB, GROWTH_OBJECTS = 8.0, 8000
OTHER_RANKS = 1.25  # a rank with another number may have other messages in the same plan
DEATH_MB, DEATH_OBJECTS = 6.0, 6000  # more for each death: objects whose buffers MPI may still write to are kept
LAST_CHARACTERS = 4000


@dataclass(frozen=True)
class Soak:
    """Calls of a job."""

    calls: int
    ranks: int
    deaths: int  # one after the other, each of which another rank replaces
    seed: int
    methods: tuple[str, ...] = ()  # names; empty: all

    def request(self) -> Record:
        """Return the request of a job for `apps.chaos.soak_rank`."""
        span = (LAST_DEATH - FIRST_DEATH) / max(1, self.deaths)
        return {
            "calls": self.calls,
            "ranks": self.ranks,
            "look_every": max(1, self.calls // LOOKS),
            "seed": self.seed,
            "methods": sorted(self.methods or ALGORITHMS),
            "on_failure": "regroup" if self.deaths else "raise",
            "spares": self.deaths,
            "deaths": [round(self.calls * (FIRST_DEATH + span * number)) for number in range(self.deaths)],
        }


Looks = dict[int, list[dict[str, Any]]]


def run(soak: Soak) -> Record:
    """Run a job, and return its record."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-soak-") as scratch:
        folder = make_folder(Path(scratch))
        write_record(folder / "request.json", soak.request())
        command = [
            find_mpirun(), *(FAULT_TOLERANT if soak.deaths else ()), "-n", str(soak.ranks + soak.deaths),
            "--oversubscribe", "--bind-to", "none", sys.executable, "-m", "apps.chaos.soak_rank",
            str(folder / "request.json"),
        ]  # fmt: skip
        env = mpi_environment() | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        job = RunningJob(command, env, folder)
        start, output = time.monotonic(), ""
        rows: list[tuple[int, dict[str, Any]]] = []
        try:
            hangs = _watch(job, rows)
            status = job.status()
            rows += job.read()
        finally:
            output = job.end()
    return summary(soak, rows, status, hangs, time.monotonic() - start, output)


def _watch(job: RunningJob, rows: list[tuple[int, dict[str, Any]]]) -> bool:
    """Read the lines of a job until it ends; return True if it has hung."""
    last = time.monotonic()
    while job.status() is None:
        time.sleep(POLL_S)
        if new := job.read():
            rows += new
            last = time.monotonic()
        elif time.monotonic() - last > WATCHDOG_S:
            job.request_stacks()
            time.sleep(STACKS_S)
            return True
    return False


def summary(
    soak: Soak, rows: Sequence[tuple[int, dict[str, Any]]], status: int | None, hangs: bool, seconds: float, output: str
) -> Record:
    """Return the record of a job's lines."""
    looks: Looks = {}
    for rank, row in rows:
        if row["kind"] == "look":
            looks.setdefault(rank, []).append(row)
    ended = [rank for rank, row in rows if row["kind"] == "end"]
    deaths = sum(row["kind"] == "death" for _, row in rows)
    found = [growth(one) for rank, one in sorted(looks.items()) if rank in ended]
    texts = []
    if hangs or status != 0 or len(ended) < soak.ranks:
        reason = "it hung" if hangs else f"status {status}"
        texts.append(f"{reason}; {len(ended)} of {soak.ranks} ranks ended\n{output[-LAST_CHARACTERS:]}")
    texts += [
        f"rank {rank}: results differ before call {row['call']}"
        for rank, one in looks.items()
        for row in one
        if not row["is_equal"]
    ]
    texts += [text for rank, one in sorted(looks.items()) if rank in ended for text in leaks(rank, one)]
    keys = found[0] if found else {}
    return {
        **asdict(soak),
        "seconds": seconds,
        "died": deaths,
        "ended": len(ended),
        "growth": {key: max(one[key] for one in found) for key in keys},
        "looks": {
            str(rank): [{key: row[key] for key in ("call", *COUNTED)} for row in one]
            for rank, one in sorted(looks.items())
        },
        "last": [one[-1] for rank, one in sorted(looks.items()) if rank in ended],
        "failures": texts,
        "environment": environment(),
    }


def growth(looks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the growth of each count of a rank between a fifth of its calls and the end, and that of its memory.

    Examples
    --------
    >>> from apps.chaos.soak import growth
    >>> growth([{"call": call, "resident_mb": 60.0 + call, "plans": 3} for call in range(10)])
    {'resident_mb': 7.0, 'plans': 0}
    """
    early, late = looks[len(looks) // 5], looks[-1]
    return {key: late[key] - early[key] for key in late if key in COUNTED}


COUNTED = (
    "resident_mb", "objects", "in_flight", "requests", "users", "tag", "programs", "plans", "files", "threads",
)  # fmt: skip


def leaks(rank: int, looks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the leaks of a rank, a text each."""
    found, late = growth(looks), looks[-1]
    early = looks[len(looks) // 5]
    seen = {member for look in looks[len(looks) // 5 :] for member in look["members"]}
    n_deaths = len(seen - set(late["members"]))
    texts = [f"rank {rank}: {late['in_flight']} calls in flight"] if late["in_flight"] else []
    if found["resident_mb"] > (most := GROWTH_MB + DEATH_MB * n_deaths):
        texts.append(f"rank {rank}: resident memory has grown by {found['resident_mb']:.1f} MiB, more than {most} MiB")
    if found["objects"] > GROWTH_OBJECTS + DEATH_OBJECTS * n_deaths:
        texts.append(f"rank {rank}: {found['objects']} objects more")
    most_part = OTHER_RANKS if n_deaths else 1.0
    return texts + [
        f"rank {rank}: {found[key]} {key} more"
        for key in ("requests", "users", "programs", "plans", "files", "threads")
        if late[key] > most_part * early[key]
    ]


HEADINGS = (
    "ranks", "calls", "deaths", "resident at the end, MiB", "more than after a fifth, MiB", "calls in flight",
    "more requests, plans, programs", "minutes", "failures",
)  # fmt: skip


def table(records: Sequence[Record]) -> str:
    """Return records as a table."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"| {' | '.join(['---:'] * len(HEADINGS))} |"]
    for one in records:
        more = one["growth"]
        cells = (
            one["ranks"], f"{one['calls']:,}", one["died"],
            f"{max((row['resident_mb'] for row in one['last']), default=0.0):.1f}",
            f"{more.get('resident_mb', 0.0):.1f}", sum(row["in_flight"] for row in one["last"]),
            " / ".join(f"{more.get(key, 0)}" for key in ("requests", "plans", "programs")),
            f"{one['seconds'] / 60:.1f}", len(one["failures"]),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
