"""Runs the multi-rank tests in lanes: once under ``mpirun`` for every number of ranks.

``python tests/run_lanes.py [--ranks 3,8,2,4,1] [--tests PATH] [--no-once] [arguments of pytest]``. In a run of all
tests each runs in one lane: its promise holds on any number of ranks that it can run on. Markers add lanes, and a
plan's other numbers are those of threads (`tests/ranks_as_threads.py`). A lane that hangs is ended, a lane in which no
test runs has failed, and all lanes are run, whether or not earlier ones have passed. Ranks wait half of the time, for
each other or for an event that must not come: with ``--at-once 2`` another lane has the cores meanwhile. The lanes that
take longest come first, so that none is left alone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
TESTS = PROJECT / "tests" / "mpi"
# The lane of a test: the first of these that it can run in. Three are no power of two, and one of them is neither the
# first nor the last.
HOME_LANES = (3, 2, 4, 8, 1)
# Markers of tests that a further lane shows something new of. Eight are a power of two, a torus and a deep tree.
FURTHER_LANES = {"alone_too": 1, "eight_too": 8, "every_size": 8}
# Words of which a file has one if it has tests of a lane other than the first. Files without them are not even loaded
# there: most of the time of such a lane went into collecting tests of the first one, on every rank.
WORDS = {
    1: re.compile(r"alone_too|max_size=[1A-Z]"),
    2: re.compile(r"two_ranks|max_size=[2A-Z]"),
    4: re.compile(r'min_size=[4A-Z]|"mpi_comm", \['),
    8: re.compile(r'eight_too|every_size|min_size=[5-8A-Z]|"mpi_comm", \['),
}
KILL_AFTER_S = 10.0
POLL_S = 0.1


def environment() -> dict[str, str]:
    """Return this process's environment with what ``slurm/env.sh`` adds to it, for this virtual environment."""
    base = os.environ | {"MPICOMP_VENV": sys.prefix}
    script = f'. "{PROJECT}/slurm/env.sh" && env -0'
    listing = subprocess.run(["bash", "-c", script], env=base, check=True, capture_output=True).stdout.decode()
    found = dict(line.split("=", 1) for line in listing.split("\0") if line)
    return {"MPICOMP_FLIGHT_DIR": ""} | found  # tests of timeouts leave no files


def lanes_of(fits: Callable[[int], bool], markers: Container[str] = ()) -> set[int]:
    """Return the lanes of a test in a run of all tests; `fits` is true of the numbers of ranks that it can run on."""
    possible = [n_ranks for n_ranks in HOME_LANES if fits(n_ranks)]
    others = {lane for marker, lane in FURTHER_LANES.items() if marker in markers and lane in possible}
    return {*possible[:1], *others}


@cache
def may_have_tests(path: Path, n_ranks: int) -> bool:
    """Return whether the text of a file lets it have tests of a lane in a run of all tests."""
    return n_ranks not in WORDS or WORDS[n_ranks].search(path.read_text()) is not None


def left_out(n_ranks: int) -> list[str]:
    """Return pytest's options that leave out files without tests of a lane in a run of all tests."""
    return [f"--ignore={path}" for path in sorted(TESTS.rglob("test_*.py")) if not may_have_tests(path, n_ranks)]


class Lane:
    """The tests under ``mpirun`` on one number of ranks, from the start of the job on.

    Three limits stand behind each other, a few seconds apart: the launcher's own, SIGTERM to the launcher, SIGKILL.

    Parameters
    ----------
    output : path, optional
        File for the lane's output; None: it prints where this program does.
    """

    def __init__(
        self, n_ranks: int, arguments: Sequence[str], env: Mapping[str, str], timeout_s: float, output: Path | None
    ) -> None:
        self.n_ranks, self.output, self._timeout_s = n_ranks, output, timeout_s
        command = ["mpirun", "-n", str(n_ranks), sys.executable, "-m", "pytest", "--with-mpi"]
        color = "yes" if sys.stdout.isatty() else "no"  # the launcher gives its ranks a terminal of their own
        command += ["-c", str(PROJECT / "pyproject.toml"), "-p", "no:cacheprovider", f"--color={color}", *arguments]
        shared_memory = Path("/dev/shm")
        # A lane that is ended by force cleans nothing up: it must not fill the machine.
        self._folders = contextlib.ExitStack()
        files = self._folders.enter_context(tempfile.TemporaryDirectory())
        parent = shared_memory if shared_memory.is_dir() else None
        segments = self._folders.enter_context(tempfile.TemporaryDirectory(dir=parent))
        lane_env = {**env, "TMPDIR": files, "OMPI_MCA_btl_sm_backing_directory": segments}
        # Both launchers take their limit from here: Open MPI's and MPICH's hydra.
        lane_env |= {"MPIEXEC_TIMEOUT": str(int(timeout_s)), "PYTHONUNBUFFERED": "1"}
        target = None if output is None else self._folders.enter_context(output.open("wb"))
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            cwd=PROJECT,
            env=lane_env,
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=None if target is None else subprocess.STDOUT,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the exit status, 124 where the lane has taken too long, or None while it runs."""
        if self._process.poll() is None and time.monotonic() - self.started > self._timeout_s + KILL_AFTER_S:
            return 124
        return self._process.returncode

    def end(self) -> None:
        """End its processes that still run, and remove its files."""
        _end(self._process)
        self._folders.close()


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
    parser.add_argument("--ranks", default="3,8,2,4,1", help="numbers of ranks, with commas (default %(default)s)")
    parser.add_argument("--tests", default=str(TESTS), help="file, folder or test (%(default)s)")
    parser.add_argument(
        "--once",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="run each test in one lane, on 3 ranks if it can, and in those its markers add (default for all tests)",
    )
    parser.add_argument(
        "--lane-timeout",
        type=float,
        default=3600.0,
        help="seconds a lane may take, for hangs outside of tests (%(default)s)",
    )
    parser.add_argument(
        "--at-once", type=int, default=1, help="lanes that run at one time, and print when they end (%(default)s)"
    )
    options, arguments = parser.parse_known_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the lanes end as well
    env = environment()
    if shutil.which("mpirun", path=env.get("PATH")) is None:
        parser.error(f"there is no mpirun for {sys.executable}: use the Python of an environment with MPI")
    of_all = Path(options.tests).resolve() == TESTS
    once = of_all if options.once is None else options.once
    waiting, running = [int(one) for one in options.ranks.split(",")], list[Lane]()
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                while waiting and len(running) < options.at_once:
                    n_ranks = waiting.pop(0)
                    print(f"\n=== {n_ranks} ranks ===", flush=True)
                    output = Path(folder, str(n_ranks)) if options.at_once > 1 else None
                    chosen = [options.tests, *(["--once"] * once), *arguments]
                    chosen += left_out(n_ranks) if once and of_all else []
                    running.append(Lane(n_ranks, chosen, env, options.lane_timeout, output))
                time.sleep(POLL_S)
                for lane in [one for one in running if one.poll() is not None]:
                    status = lane.poll()
                    running.remove(lane)
                    lane.end()
                    seconds = time.monotonic() - lane.started
                    if lane.output is not None:
                        print(lane.output.read_text(errors="replace"), flush=True)
                    print(f"=== {lane.n_ranks} ranks: exit {status} after {seconds:.1f} s ===", flush=True)
                    if status != 0:
                        failed.append(f"{lane.n_ranks} ranks (exit {status})")
        finally:
            for lane in running:
                lane.end()
    if failed:
        print(f"lanes that failed: {', '.join(failed)}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
