"""``mpicomp advise`` measures network and kernels, and predicts the time of a training step with each method.

``mpirun -n 4 mpicomp advise --count 25e6 --compute-ms 120``

The exit status is 0; 1 where a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TextIO

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import Communicator
from collectives.arrays.elements import aligned_empty
from collectives.consistency.descriptions import gather_texts
from collectives.cost.link import LinkModel
from collectives.execution.workers import MOST_THREADS
from collectives.network_probe import measure_network
from collectives.progress.polling import wait
from mpicomp.algorithms import Algorithm
from mpicomp.cli.advise import report
from mpicomp.cli.advise.predict import MOST_WALKED, WALKED, Job, break_even, fastest_dense, ways
from mpicomp.cli.advise.report import COMPARED, METHODS, Record
from mpicomp.cli.advise.speeds import Speed, measure_speed, without_dense_rounds
from mpicomp.cli.arguments import DTYPES, choice, count, integer, number, seconds
from mpicomp.cli.command import Steps, UsageError, conduct, open_file, require_none, write
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
        "--model", metavar="MODULE:NAME", help="instead of --count: callable that makes the torch model to train"
    )
    parser.add_argument("--dtype", default="float32", help="float16, float32 or float64 (default %(default)s)")
    parser.add_argument("--compute-ms", default="0", help="time of a step without its all-reduce (default %(default)s)")
    parser.add_argument("--methods", help="names, separated by commas (default all); dense is always measured")
    parser.add_argument("--network", metavar="FILE", help="read the network from this file, and measure kernels alone")
    parser.add_argument("--save", metavar="FILE", help="write the network, for Communicator(network=FILE)")
    parser.add_argument("--ranks", help="predict for this number of ranks on the network (default this job's)")
    parser.add_argument(
        "--threads", default="1", help="threads of each rank, for Communicator(threads=...) (default %(default)s)"
    )
    parser.add_argument("--timeout", default="60", help="seconds to wait for a silent rank (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write network, speeds and predictions")


def run(args: argparse.Namespace) -> int:
    """Measure, predict and advise; return the exit status, the same on every rank."""
    mpicomp.install_abort_hook()
    return conduct(COMMAND, lambda: _start(args), lambda request, comm: _run(request, comm, args))


def _start(args: argparse.Namespace) -> tuple[AdviseRequest, Communicator]:
    request, problem = None, ""
    try:
        request = AdviseRequest.parse(args)
    except ValueError as error:
        problem = str(error)
    require_none(MPI.COMM_WORLD, problem, AGREEING_S)  # a file or model may exist on some ranks alone
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


def _run(request: AdviseRequest, comm: Communicator, args: argparse.Namespace) -> int:
    if comm.size == 1:
        raise UsageError(ALONE)
    with open_file(comm, "--json", args.json) as record_file, open_file(comm, "--save", args.save) as network_file:
        job, speeds, mpi_s, hosts = _measure(request, comm, network_file)
        record: Record = {}
        if comm.rank == 0:
            record = predictions(request, job, speeds, mpi_s) | {"hosts": hosts}
            print(report.text(record), flush=True)
        here = f"rank {comm.rank} of {comm.size}"
        wait(comm.mpi_comm.Ibarrier(), PREDICTING_S, lambda: f"{here}: rank 0 does not end its predictions")
        write(comm, "--json", record_file, json.dumps(record, indent=1) + "\n")
    return 0


def _measure(
    request: AdviseRequest, comm: Communicator, network_file: TextIO | None
) -> tuple[Job, dict[str, Speed], float | None, int]:
    """Measure; return the job, each method's speed, the time of MPI's own all-reduce, if any, and hosts; collective."""
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


def predictions(request: AdviseRequest, job: Job, speeds: Mapping[str, Speed], mpi_s: float | None) -> Record:
    """Return the record for report and JSON; `mpi_s` is the measured time of MPI's own all-reduce."""
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
    """Return the median time of MPI's own all-reduce on the slowest rank, extrapolated for long vectors."""
    part = min(1.0, MPI_LONGEST_S / max(expected_s * (MPI_CALLS + 1), 1e-9))
    count = max(1, int(n * part))
    kind = "float32" if dtype == "float16" else dtype
    x, out = aligned_empty(count, kind, 64), aligned_empty(count, kind, 64)
    x[:] = 1
    seconds = alternate({"mpi": partial(comm.mpi_comm.Allreduce, x, out)}, MPI_CALLS, 1, comm)["mpi"]
    return float(np.median(seconds)) * n / count


@dataclass(frozen=True)
class AdviseRequest:
    """Parsed arguments."""

    count: int  # elements
    dtype: str
    compute_s: float  # of a step
    methods: tuple[str, ...]  # of METHODS, dense among them
    network: LinkModel | None  # None: to be measured
    ranks: int | None  # None: this job's
    threads: int  # of each rank
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> AdviseRequest:
        """Read the values of the options. Raises ValueError with the option, its value and the values it accepts."""
        if (args.count is None) == (args.model is None):
            raise ValueError("give the length of the gradient: either --count 25e6 or --model module:name")
        return cls(
            dtype=choice("--dtype", args.dtype, DTYPES),
            compute_s=number("--compute-ms", args.compute_ms, 0.0) / 1e3,
            methods=tuple(METHODS) if args.methods is None else _chosen(args.methods),
            network=_network(args.network),
            ranks=None if args.ranks is None else integer("--ranks", args.ranks, 2),
            threads=integer("--threads", args.threads, 1, MOST_THREADS),
            timeout_s=seconds("--timeout", args.timeout),
            count=_parameters(args.model) if args.count is None else count(args.count),  # may take long
        )


def _chosen(text: str) -> tuple[str, ...]:
    """Return the methods of ``"marsit,scalecom"`` and dense, in the order of `METHODS`."""
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in METHODS), None)
    if unknown is not None:
        raise ValueError(f"--methods {text}: there is no {unknown!r}: choose from {', '.join(METHODS)}")
    if set(names) == {"dense"}:
        raise ValueError(f"--methods {text}: name one or more to compare with dense")
    return tuple(name for name in METHODS if name == "dense" or name in names)


def _network(path: str | None) -> LinkModel | None:
    if path is None:
        return None
    try:
        return LinkModel.load(path)
    except OSError as error:
        raise ValueError(f"--network {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"--network {error}") from error


def _parameters(text: str) -> int:
    """Return the number of trainable parameters of the model that the callable ``"module:name"`` makes."""
    module, colon, name = text.partition(":")
    cure = "write it as package.module:callable, importable from here, such as torchvision.models:resnet50"
    if not colon:
        raise ValueError(f"--model {text}: {cure}")
    try:
        model = getattr(importlib.import_module(module), name)()
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    except Exception as error:
        raise ValueError(f"--model {text}: {type(error).__name__}: {error}; {cure}") from error
    if not count:
        raise ValueError(f"--model {text} has no trainable parameters")
    return int(count)
