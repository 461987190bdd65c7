"""``mpicomp advise`` measures network and kernels, and predicts what each method would make of a training step.

``mpirun -n 4 mpicomp advise --count 25e6 --compute-ms 120``

The exit status is 0; 1 where a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import Communicator
from collectives.arrays.elements import aligned_empty
from collectives.consistency.call_check import gather_texts
from collectives.network_probe import measure_network
from collectives.progress.polling import wait
from mpicomp.algorithms import Algorithm
from mpicomp.cli.advise import report
from mpicomp.cli.advise.predict import MOST_WALKED, WALKED, Job, break_even, fastest_dense, ways
from mpicomp.cli.advise.request import COMPARED, METHODS, Request
from mpicomp.cli.advise.speeds import Speed, measure_speed, without_dense_rounds
from mpicomp.cli.rank0 import UsageError, conduct, open_file, require_none, write
from mpicomp.cli.terminal import Steps
from mpicomp.cli.timing import alternate

COMMAND = "mpicomp advise"
ALONE = "one rank sends and merges nothing: start two or more with mpirun, also with --network and --ranks"
MPI_CALLS, MPI_LONGEST_S = 3, 10.0
AGREEING_S = 60.0
PREDICTING_S = 600.0  # the other ranks wait as long for rank 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp advise``. Their values are read in `run`, where one rank can speak for all."""
    parser.epilog = (
        "Predictions are for vectors in the host's memory: time those on GPUs by mpicomp bench --device cuda."
    )
    parser.add_argument("--count", help="elements of the gradient, such as 25e6")
    parser.add_argument(
        "--model", metavar="MODULE:NAME", help="instead of --count: what makes a torch model, whose parameters count"
    )
    parser.add_argument("--dtype", default="float32", help="float16, float32 or float64 (default %(default)s)")
    parser.add_argument(
        "--compute-ms", default="0", help="what a step computes beside the all-reduce (default %(default)s)"
    )
    parser.add_argument("--methods", help="names, with commas, where not all are wanted; dense is always measured")
    parser.add_argument("--network", metavar="FILE", help="take the network from here, and measure kernels alone")
    parser.add_argument("--save", metavar="FILE", help="write the network, for Communicator(network=FILE)")
    parser.add_argument("--ranks", help="predict for as many ranks on such a network, not for this job's")
    parser.add_argument(
        "--threads", default="1", help="of each rank, for Communicator(threads=...) (default %(default)s)"
    )
    parser.add_argument("--timeout", default="60", help="seconds a silent rank is awaited (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write network, speeds and predictions")


def run(args: argparse.Namespace) -> int:
    """Measure, predict, advise; the exit status, the same on every rank."""
    mpicomp.install_abort_hook()
    return conduct(COMMAND, lambda: _start(args), lambda request, comm: _run(request, comm, args))


def _start(args: argparse.Namespace) -> tuple[Request, Communicator]:
    request, problem = None, ""
    try:
        request = Request.parse(args)
    except ValueError as error:
        problem = str(error)
    require_none(MPI.COMM_WORLD, problem, AGREEING_S)  # files and models may be there for some ranks alone
    assert request is not None
    try:
        return request, Communicator(
            timeout=request.timeout_s,
            network=request.network,
            arrival_timeout=request.timeout_s,
            threads=request.threads,
        )
    except ValueError as error:
        raise UsageError(f"--network {args.network}: {error}") from error


def _run(request: Request, comm: Communicator, args: argparse.Namespace) -> int:
    if comm.size == 1:
        raise UsageError(ALONE)
    with open_file(comm, "--json", args.json) as record_file, open_file(comm, "--save", args.save) as network_file:
        job, speeds, mpi_s, hosts = _measure(request, comm, network_file)
        record: dict[str, Any] = {}
        if comm.rank == 0:
            record = predictions(request, job, speeds, mpi_s) | {"hosts": hosts}
            print(report.text(record), flush=True)
        here = f"rank {comm.rank} of {comm.size}"
        wait(comm.mpi_comm.Ibarrier(), PREDICTING_S, lambda: f"{here}: rank 0 does not end its predictions")
        write(comm, "--json", record_file, json.dumps(record, indent=1) + "\n")
    return 0


def _measure(
    request: Request, comm: Communicator, network_file: TextIO | None
) -> tuple[Job, dict[str, Speed], float | None, int]:
    """What is to be predicted, each method's speed, MPI's own all-reduce if it can be timed, and hosts; collective."""
    plain = {name: without_dense_rounds(METHODS[name]) for name in request.methods}
    size = request.ranks or comm.size
    timed = size == comm.size and request.network is None
    n_steps = (request.network is None) + len(set(plain.values())) + timed
    with Steps(COMMAND, n_steps, comm.rank == 0) as steps:
        hosts = len(set(gather_texts(comm.mpi_comm, platform.node(), comm.timeout)))
        network = request.network
        if network is None:
            steps.begin("measuring the network")
            network = measure_network(comm)
        write(comm, "--save", network_file, json.dumps(asdict(network), indent=1) + "\n")
        measured: dict[Algorithm, Speed] = {}
        for name, one in plain.items():
            if one not in measured:
                steps.begin(f"measuring {name}")
                measured[one] = measure_speed(comm, one, request.count, request.dtype, network)
        speeds = {name: measured[one] for name, one in plain.items()}
        job = Job(size, request.count, request.dtype, network, comm.packed_piece_bytes())
        mpi_s = None
        if timed:
            steps.begin("timing MPI's own all-reduce")
            mpi_s = time_mpi(comm, request.count, request.dtype, fastest_dense(job, speeds["dense"])(job))
    return job, speeds, mpi_s, hosts


def predictions(request: Request, job: Job, speeds: Mapping[str, Speed], mpi_s: float | None) -> dict[str, Any]:
    """Everything that is told, as JSON takes it; `mpi_s`: MPI's own all-reduce, measured."""
    dense = fastest_dense(job, speeds["dense"])
    methods = {name: (METHODS[name], speed) for name, speed in speeds.items()}
    return {
        "ranks": job.size,
        "threads": request.threads,
        "count": job.n,
        "dtype": job.dtype,
        "compute_s": request.compute_s,
        "network": asdict(job.network),
        "speeds": {
            name: asdict(speed.work) | {"call_s": speed.call_s, "volume": speed.volume}
            for name, speed in speeds.items()
        },
        "mpi_s": mpi_s,
        "dense_s": dense(job),
        "rows": [
            {
                "method": way.method,
                "topology": topology,
                "compared": way.method in COMPARED,
                "seconds": (seconds := way.seconds(job)),
                "step_s": seconds + request.compute_s,
                "break_even_bytes_s": None if way.method == "dense" else break_even(way, dense, job),
            }
            for topology, way in ways(job, methods, speeds["dense"])
        ],
        "not_predicted": list(WALKED) if job.size > MOST_WALKED else [],
    }


def time_mpi(comm: Communicator, n: int, dtype: str, expected_s: float) -> float:
    """Median time of MPI's own all-reduce on the slowest rank; of a part of the vector where all of it takes long."""
    part = min(1.0, MPI_LONGEST_S / max(expected_s * (MPI_CALLS + 1), 1e-9))
    count = max(1, int(n * part))
    kind = "float32" if dtype == "float16" else dtype
    x, out = aligned_empty(count, kind, 64), aligned_empty(count, kind, 64)
    x[:] = 1
    seconds = alternate({"mpi": partial(comm.mpi_comm.Allreduce, x, out)}, MPI_CALLS, 1, comm)["mpi"]
    return float(np.median(seconds)) * n / count
