"""Jobs that measure over MPI: on emulated hosts with links of a chosen rate, or between processes of this machine.

A job is a module that is run as ``python -m MODULE REQUEST`` on every rank: it reads a JSON file, and its rank 0 writes
what it found, JSON as well, into the file that the request calls ``path``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from apps.emulator.link_speed import transfer
from apps.emulator.mpirun import run_on_hosts
from apps.emulator.network import ClusterError, Layout, Network
from apps.emulator.rate import Rate
from apps.launch import JobFailed, mpi_environment, python_command, run_or_raise, write_request
from apps.records import Record, read_record

LONGEST_S = 1200.0
PROBE_S = 0.3  # of a link
FOUND = "found.json"


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
        command = python_command(ranks, _job(folder, module, request))
        run_or_raise(module, command, mpi_environment(), LONGEST_S)
        return _found(folder)


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
        run_on_hosts(network, folder, module, _job(folder, module, request), LONGEST_S)
        return {**_found(folder), "payload_bits_per_s": carried}


def _job(folder: Path, module: str, request: Record) -> list[str]:
    return ["-m", module, write_request(folder, {**request, "path": str(folder / FOUND)})]


def _found(folder: Path) -> Record:
    path = folder / FOUND
    if not path.exists():
        raise JobFailed(f"the job ended without writing {path.name}: its rank 0 must write the file that `path` names")
    return read_record(path)


__all__ = ["ClusterError", "JobFailed", "on_hosts", "on_this_machine"]
