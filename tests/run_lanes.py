"""Runs the multi-rank tests in lanes: once under ``mpirun`` for every number of ranks.

``python tests/run_lanes.py [--ranks 1,2,3,4,8] [--tests PATH] [arguments of pytest]``. A lane that hangs is ended, a
lane in which no test runs has failed, and all lanes are run whatever came of the earlier ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
KILL_AFTER_S = 10.0


def environment() -> dict[str, str]:
    """Return this process's environment with what ``slurm/env.sh`` adds to it, for this virtual environment."""
    base = os.environ | {"MPICOMP_VENV": sys.prefix}
    script = f'. "{PROJECT}/slurm/env.sh" && env -0'
    listing = subprocess.run(["bash", "-c", script], env=base, check=True, capture_output=True).stdout.decode()
    return dict(line.split("=", 1) for line in listing.split("\0") if line)


def run_lane(n_ranks: int, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float) -> int:
    """Run one lane and return its exit status: 124 where it had to be ended.

    Three limits stand behind each other, a few seconds apart: the launcher's own, SIGTERM to the launcher, SIGKILL.
    """
    command = ["mpirun", "-n", str(n_ranks), sys.executable, "-m", "pytest", "--with-mpi"]
    color = "yes" if sys.stdout.isatty() else "no"  # the launcher gives its ranks a terminal of their own
    command += ["-c", str(PROJECT / "pyproject.toml"), "-p", "no:cacheprovider", f"--color={color}", *arguments]
    shared_memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory() as files,
        tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as segments,
    ):
        # A lane that is ended by force cleans nothing up: it must not fill the machine.
        lane_env = {**env, "TMPDIR": files, "OMPI_MCA_btl_sm_backing_directory": segments}
        # Both launchers take their limit from here: Open MPI's and MPICH's hydra.
        lane_env |= {"MPIEXEC_TIMEOUT": str(int(timeout_s)), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=PROJECT, env=lane_env, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait(timeout_s + KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_AFTER_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lanes and return 0 only if all of them passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", default="1,2,3,4,8", help="numbers of ranks, with commas (default %(default)s)")
    parser.add_argument("--tests", default=str(PROJECT / "tests" / "mpi"), help="file, folder or test (%(default)s)")
    parser.add_argument("--lane-timeout", type=float, default=1200.0, help="seconds a lane may take")
    options, arguments = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the lane ends as well
    env = environment()
    failed: list[str] = []
    for n_ranks in map(int, options.ranks.split(",")):
        print(f"\n=== {n_ranks} ranks ===", flush=True)
        started = time.monotonic()
        status = run_lane(n_ranks, [options.tests, *arguments], env, options.lane_timeout)
        print(f"=== {n_ranks} ranks: exit {status} after {time.monotonic() - started:.1f} s ===", flush=True)
        if status != 0:
            failed.append(f"{n_ranks} ranks (exit {status})")
    if failed:
        print(f"lanes that failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
