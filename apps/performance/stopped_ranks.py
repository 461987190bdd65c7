"""Stop a rank of a job at a random place, and count how often the others name it, how late, and in which files.

``python -m apps.performance.stopped_ranks --trials 40``. Each trial is a job of 2, 3, 5 or 8 ranks, with a progress
thread or without one, in which one rank gets SIGSTOP: in a call, between two calls, or at a random moment.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from apps.launch import PROJECT, mpi_environment
from mpicomp.cli.analyze import Report, analyze
from mpicomp.cli.flight_files import read

RANKS = (2, 3, 5, 8)
PLACES = ("in a call", "between calls", "any moment")
LONGEST_S = 120.0
PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import mpicomp
victim, place, thread, timeout, seed, folder = sys.argv[1:]
victim, rng = int(victim), np.random.default_rng(int(seed))
comm = mpicomp.Communicator(timeout=float(timeout), arrival_timeout=float(timeout))
if thread == "1":
    comm.start_progress_thread()
method = mpicomp.Marsit().start(comm, 20_000)
x, at = np.ones(20_000, np.float32), int(rng.integers(5, 30))
steps = 0
begun = time.monotonic()
def stop():
    open(os.path.join(folder, "stopped"), "w").write(str(time.time()))
    os.kill(os.getpid(), signal.SIGSTOP)
def one_step():
    method.aggregate(x)
    comm.allreduce(x)
    comm.allreduce(1.0)
try:
    while time.monotonic() < begun + 60:
        if comm.rank == victim and steps == at:
            if place == "between calls":
                stop()
            elif place == "in a call":
                handle = method.begin(x)
                handle.poll()
                stop()
                handle.wait()
                comm.allreduce(x)
                comm.allreduce(1.0)
                steps += 1
                continue
            else:
                delay = float(rng.uniform(0, 0.02))
                threading.Thread(target=lambda: (time.sleep(delay), stop()), daemon=True).start()
        one_step()
        steps += 1
except mpicomp.CollectiveError as error:
    open(os.path.join(folder, f"error-{comm.rank}"), "w").write(f"{time.time()} {error}")
    time.sleep(1)
    raise
"""


def trial(number: int, seed: int, timeout: float) -> dict[str, object] | None:
    """Run a job and return how it ended; None: no rank was stopped."""
    draw = random.Random(seed * 1000 + number)
    ranks, place, thread = RANKS[number % len(RANKS)], PLACES[number // len(RANKS) % len(PLACES)], draw.randrange(2)
    victim = draw.randrange(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder, flights = Path(name), Path(name, "flights")
        arguments = [str(victim), place, str(thread), str(timeout), str(draw.randrange(1 << 30)), name]
        command = ["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable, "-c", PROGRAM, *arguments]
        env = mpi_environment() | {"MPICOMP_FLIGHT_DIR": str(flights), "PYTHONPATH": str(PROJECT)}
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        stopped = folder / "stopped"
        if not stopped.exists():  # the machine was so busy that ranks came late before
            return None
        errors = {int(path.name.partition("-")[2]): path.read_text() for path in folder.glob("error-*")}
        errors.pop(victim, None)  # raised once the launcher has woken it
        late_s = [float(text.split()[0]) - float(stopped.read_text()) - timeout for text in errors.values()]
        report = _report(flights)
        named = [text for text in errors.values() if re.search(rf"no answer from rank {victim}(;|$)", text)]
        return {
            "ranks": ranks,
            "place": place,
            "progress_thread": bool(thread),
            "ended": process.returncode not in (0, -signal.SIGKILL),
            "named": bool(errors) and len(named) == len(errors),
            "late_s": min(late_s) if late_s else None,
            "analyzed": report is not None and report.named == [victim],
            "kind": report.findings[0].kind if report is not None and report.findings else "",
            "files": [] if report is None else report.files,
        }


def _report(folder: Path) -> Report | None:
    try:
        return analyze(*read(folder))
    except ValueError:
        return None


def main() -> int:
    """Run the trials and print a line for each, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds, of each job's communicator")
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    number = 0
    while len(found) < args.trials and number < 2 * args.trials:
        start = time.perf_counter()
        outcome, number = trial(number, args.seed, args.timeout), number + 1
        if outcome is None:
            print(json.dumps({"disturbed": number - 1}), flush=True)
            continue
        found.append(outcome)
        print(json.dumps(found[-1] | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
    late = [float(str(one["late_s"])) for one in found if one["late_s"] is not None]
    counts = {name: sum(bool(one[name]) for one in found) for name in ("ended", "named", "analyzed")}
    print(json.dumps({"trials": len(found), **counts, "median_late_s": median(late), "most_late_s": max(late)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
