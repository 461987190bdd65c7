"""Jobs that measure over MPI: on emulated hosts with links of a chosen rate, or between processes of this machine.

A job is a module that is run as ``python -m MODULE REQUEST`` on every rank: it reads a JSON file, and its rank 0 writes
what it found, JSON as well, into the file that the request calls ``path``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from apps.emulator.link_speed import transfer
from apps.emulator.mpirun import mpirun
from apps.emulator.network import ClusterError, Layout, Network
from apps.emulator.rate import Rate
from apps.launch import mpi_environment, mpirun_command
from apps.reproduce.results import Record

PROJECT = Path(__file__).resolve().parents[2]
LONGEST_S = 1200.0
PROBE_S = 0.3  # of a link


class JobFailed(RuntimeError):
    """A job over MPI did not end as it should; says how it ended and what it said last."""


def on_this_machine(ranks: int, module: str, request: Record) -> Record:
    """Run a job between processes of this machine, which share memory.

    Raises
    ------
    JobFailed
    FileNotFoundError
        There is no MPI.
    """
    with tempfile.TemporaryDirectory(prefix="mpicomp-job-") as scratch:
        folder = Path(scratch)
        command = [*mpirun_command(ranks), sys.executable, "-m", module, str(_written(folder, request))]
        return _run(command, mpi_environment(), folder)


def on_hosts(rate: str, hosts: int, module: str, request: Record) -> Record:
    """Run a job with one rank on each emulated host of `apps.emulator`.

    Parameters
    ----------
    rate : str
        What each host can send: ``"100mbit"``, or ``"none"`` for no limit.
    hosts : int
    module : str
    request : dict

    Returns
    -------
    dict
        What the job found, and ``payload_bits_per_s``: what one connection between two hosts carried right before.

    Raises
    ------
    ClusterError
        Hosts cannot be emulated here: there is no root, or no ``tc``.
    JobFailed
    """
    layout = Layout((Rate.parse(rate),) * hosts)
    with tempfile.TemporaryDirectory(prefix="mpicomp-job-") as scratch, Network(layout) as network:
        folder = Path(scratch)
        nbytes = round(PROBE_S * (layout.rates[0].bits_per_s or 8e9) / 8)
        carried = transfer(network.nodes[0], network.nodes[1], nbytes)
        job = [sys.executable, "-m", module, str(_written(folder, request))]
        command, env = mpirun(network, folder, "openmpi", 1, job)
        return {**_run(network.nodes[0].command(command), env, folder), "payload_bits_per_s": carried}


def _written(folder: Path, request: Record) -> Path:
    path = folder / "request.json"
    path.write_text(json.dumps({**request, "path": str(folder / "found.json")}))
    return path


def _run(command: Sequence[str], env: Mapping[str, str], folder: Path) -> Record:
    own = dict(env) | {"PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), env.get("PYTHONPATH"))))}
    log = folder / "log"
    with log.open("w") as output:
        job = subprocess.Popen(
            command, cwd=PROJECT, env=own, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status: int | str = job.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            status = f"none after {LONGEST_S:.0f} s"
        finally:
            _end(job)
    found = folder / "found.json"
    if status or not found.exists():
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-30:])
        raise JobFailed(f"{' '.join(command[-2:])} ended with status {status}; it said last:\n{tail}")
    record: Record = json.loads(found.read_text())
    return record


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(10)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


__all__ = ["ClusterError", "JobFailed", "on_hosts", "on_this_machine"]
