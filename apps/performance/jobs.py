"""Starting MPI jobs in the environment of the project's batch scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from apps.launch import mpirun_command

PROJECT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment of this process with what ``slurm/env.sh`` adds, and a path to the packages."""
    base = os.environ | {"MPICOMP_VENV": sys.prefix}
    script = f'. "{PROJECT}/slurm/env.sh" && env -0'
    listing = subprocess.run(["bash", "-c", script], env=base, check=True, capture_output=True).stdout.decode()
    found = dict(line.split("=", 1) for line in listing.split("\0") if line)
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), found.get("PYTHONPATH"))))}


def command(n_ranks: int | None, arguments: Sequence[str]) -> list[str]:
    """Run this Python with `arguments`, under ``mpirun`` unless `n_ranks` is None."""
    launcher = [] if n_ranks is None else mpirun_command(n_ranks)
    return [*launcher, sys.executable, *arguments]


def run(
    n_ranks: int | None,
    arguments: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    capture: bool = False,
) -> tuple[int, str]:
    """Run a job from the project's folder to its end.

    Returns
    -------
    status : int
        124 where it had to be ended after `timeout_s`.
    output : str
        With `capture`: what it printed.
    """
    process = subprocess.Popen(
        command(n_ranks, arguments),
        cwd=PROJECT,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then ends its ranks
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        return 124, output or ""
    return process.returncode, output or ""
