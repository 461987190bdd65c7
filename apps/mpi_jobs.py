"""Call functions on all ranks of an MPI job, on emulated hosts with links of a chosen rate or on this machine.

``python -m apps.mpi_jobs REQUEST`` runs on every rank. It reads the function and its arguments from a JSON
file and calls it; rank 0 writes the result of the function.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from mpi4py import MPI

import mpicomp
from apps.emulator.link_speed import transfer
from apps.emulator.mpirun import run_on_hosts
from apps.emulator.network import Layout, Network
from apps.launch import mpi_environment, python_command, run_or_raise, write_request
from apps.records import Record, read_record, write_record
from collectives.cost.rate import Rate

TIMEOUT_S = 1200.0
PROBE_S = 0.3  # of a link


def call_on_ranks(
    function: Callable[..., Record],
    arguments: Record,
    ranks: int,
    rate: str | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Record:
    """Call a function, with `arguments` by name, on every rank of a new MPI job; return its result on rank 0."""
    name = f"{function.__module__}:{function.__qualname__}"
    with tempfile.TemporaryDirectory(prefix="mpicomp-job-") as scratch:
        folder = Path(scratch)
        path = folder / "found.json"
        request = write_request(folder, {"function": name, "arguments": arguments, "path": str(path)})
        job = ["-m", "apps.mpi_jobs", request]
        # without a rate the ranks are processes of this machine, which share memory
        if rate is None:
            run_or_raise(name, python_command(ranks, job), {**mpi_environment(), **settings}, TIMEOUT_S)
            return read_record(path)
        # each runs on an emulated host, which sends at this rate, such as "100mbit", or "none" for no limit
        layout = Layout((Rate.parse(rate),) * ranks)
        with Network(layout) as network:
            nbytes = round(PROBE_S * (layout.rates[0].bits_per_s or 8e9) / 8)
            carried = transfer(network.nodes[0], network.nodes[1], nbytes)
            own = {"MASTER_ADDR": network.nodes[0].address, **settings}
            run_on_hosts(network, folder, name, job, TIMEOUT_S, settings=own)
        # the rate of one connection between two hosts right before
        return {**read_record(path), "payload_bits_per_s": carried}


def main() -> None:
    """Run one rank of a job."""
    mpicomp.install_abort_hook()
    request = read_record(Path(sys.argv[1]), function=str, arguments=dict, path=str)
    module, _, name = request["function"].partition(":")
    found = getattr(import_module(module), name)(**request["arguments"])
    if MPI.COMM_WORLD.rank == 0:
        write_record(Path(request["path"]), found)


if __name__ == "__main__":
    main()
