"""Kill random ranks of a running Slurm job, with a mean time between failures.

Start one on each node of the job: ``srun --overlap --jobid 123 python -m apps.chaos punish --job 123``.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMIX_RANK", b"PMI_RANK")
LOOK_S = 0.5


def ranks_of_job(job: str) -> dict[int, int]:
    """Return the processes of this machine that are ranks of a Slurm job: rank by process."""
    found: dict[int, int] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, StopIteration):
            lines = (folder / "environ").read_bytes().split(b"\0")
            settings = dict(line.split(b"=", 1) for line in lines if b"=" in line)
            if settings.get(b"SLURM_JOB_ID") != job.encode():
                continue
            rank = next(settings[name] for name in RANK_VARIABLES if name in settings)
            found[int(folder.name)] = int(rank)
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    # children of ranks, such as workers that load data, are left out
    return {pid: rank for pid, rank in found.items() if found.get(parents[pid]) != rank}


def punish(
    job: str, mean_seconds: float, seed: int, most: int, report: Callable[[int, int], None], spare: int = 1
) -> int:
    """Kill ranks of a Slurm job until it has ended, `most` are dead or `spare` are left here; return their number."""
    # the time between two kills is exponentially distributed
    draw, kills, dead = random.Random(seed), 0, set[int]()
    for _ in _while_running(job, draw, mean_seconds):
        # a worker that outlives its rank looks like the rank
        ranks = {pid: rank for pid, rank in ranks_of_job(job).items() if rank not in dead}
        if len(ranks) > spare:
            pid = draw.choice(sorted(ranks))
            dead.add(ranks[pid])
            report(ranks[pid], pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                kills += 1
        if kills >= most:
            break
    return kills


def _while_running(job: str, draw: random.Random, mean_seconds: float) -> Iterator[None]:
    """Yield after random times as long as the job has ranks here."""
    while True:
        due = time.monotonic() + draw.expovariate(1 / mean_seconds)
        while (left := due - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
            if not ranks_of_job(job):
                return
        yield
