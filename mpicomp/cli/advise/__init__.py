"""``mpicomp advise`` measures network and kernels, and predicts the time of a training step with each method.

``mpirun -n 4 mpicomp advise --count 25e6 --compute-ms 120``

The exit status is 0; 1 where a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TextIO

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import Communicator
from collectives.arrays.elements import aligned_empty
from collectives.consistency.descriptions import gather_texts
from collectives.cost.link import LinkModel
from collectives.network_probe import measure_network
from collectives.progress.polling import wait
from mpicomp.algorithms import Algorithm
from mpicomp.cli.advise import report
from mpicomp.cli.advise.predict import MOST_WALKED, WALKED, PredictedJob, break_even, fastest_dense, is_predicted, ways
from mpicomp.cli.advise.report import COMPARED, METHODS, Record
from mpicomp.cli.advise.request import AdviseRequest
from mpicomp.cli.advise.speeds import (
    NodeSpeed,
    Speed,
    has_equal_nodes,
    measure_nodes,
    measure_speed,
    without_dense_rounds,
)
from mpicomp.cli.command import Steps, UsageError, conduct, open_file, require_none, write
from mpicomp.cli.timing import alternate

COMMAND = "mpicomp advise"
ALONE = "one rank sends and merges nothing: start two or more with mpirun, also with --network and --ranks"
MPI_CALLS, MPI_LONGEST_S = 3, 10.0
LEAST_S, MOST_S = 2, 5  # usual duration of a measurement
QUICK_S = 42.0  # after which --quick begins no further measurement: a minute less start, end and a slow method
AGREEING_S = 60.0
PREDICTING_S = 600.0  # the other ranks wait as long for rank 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp advise``. Their values are read in `run`, where one rank can speak for all."""
    parser.epilog = (
        "Predictions are for vectors in the host's memory: time those on GPUs by mpicomp bench --device cuda."
    )
    add = parser.add_argument
    add("--count", help="elements of the gradient, such as 25e6")
    add("--model", metavar="MODULE:NAME", help="instead of --count: callable that makes the torch model to train")
    add("--dtype", default="float32", help="float16, float32 or float64 (default %(default)s)")
    add("--compute-ms", default="0", help="time of a step without its all-reduce (default %(default)s)")
    names = "names, separated by commas (default all); dense is always measured"
    add("--methods", "--algorithms", metavar="NAMES", help=names)
    add("--network", metavar="FILE", help="read the network from this file, and measure kernels alone")
    add("--save", metavar="FILE", help="write the network, for Communicator(network=FILE)")
    add("--ranks", help="predict for this number of ranks on the network (default this job's)")
    add("--ranks-per-node", metavar="L", help="let groups of L neighbouring ranks of a host count as a node")
    add("--threads", default="1", help="threads of each rank, for Communicator(threads=...) (default %(default)s)")
    add("--quick", action="store_true", help="take at most a minute: fewer and shorter calls, of the best methods")
    add("--timeout", default="60", help="seconds to wait for a silent rank (default %(default)s)")
    add("--json", metavar="FILE", help="write network, speeds and predictions")


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
            ranks_per_node=request.ranks_per_node,
        )
    except ValueError as error:
        raise UsageError(f"--network {args.network}: {error}") from error


def _run(request: AdviseRequest, comm: Communicator, args: argparse.Namespace) -> int:
    if comm.size == 1:
        raise UsageError(ALONE)
    with open_file(comm, "--json", args.json) as record_file, open_file(comm, "--save", args.save) as network_file:
        record = _measure(request, comm, network_file)
        if comm.rank == 0:
            print(report.conclusion(record), flush=True)
        write(comm, "--json", record_file, json.dumps(record, indent=1) + "\n")
    return 0


def _measure(request: AdviseRequest, comm: Communicator, network_file: TextIO | None) -> Record:
    """Measure and predict one method after the other; rank 0 prints the rows and returns the record. Collective."""
    size, clock = request.ranks or comm.size, Countdown(comm, QUICK_S if request.quick else math.inf)
    timed = size == comm.size and request.network is None
    local = comm.layout.sizes[0]
    has_nodes = has_equal_nodes(comm) and size % local == 0 and size > local
    piece_bytes = comm.routes.packed_piece_bytes()
    names = predicted_methods(request, (size, size // local) if has_nodes else (size,), piece_bytes)
    plain = {name: without_dense_rounds(METHODS[name]) for name in names}
    n_steps = (request.network is None) + has_nodes + len(set(plain.values())) + timed
    with Steps(COMMAND, n_steps, comm.rank == 0) as steps:
        steps.announce(_duration(n_steps, request.quick))
        hosts = len(set(gather_texts(comm.mpi_comm, platform.node(), comm.timeout)))
        network, nodes = _measure_links(request, comm, steps, network_file, has_nodes)
        job = PredictedJob(size, request.count, request.dtype, network, piece_bytes, nodes)
        measured: dict[Algorithm, Speed] = {}
        speeds: dict[str, Speed] = {}
        left_out: list[str] = []
        record: Record = {}
        mpi_s: float | None = None
        waiting = partial("{}: rank 0 does not end its predictions".format, comm.here)
        for name, one in plain.items():
            # dense sums and one method are needed for any advice
            if len(measured) > 1 and one not in measured and not clock.has_time():
                left_out.append(name)
                continue
            if one not in measured:
                steps.begin(f"measuring {name}")
                with clock.running():
                    measured[one] = measure_speed(comm, one, request.count, request.dtype, network, request.quick)
            speeds[name] = measured[one]
            if name == "dense":  # the first one, to which all others are compared
                if timed:
                    steps.begin("timing MPI's own all-reduce")
                    longest_s = MPI_LONGEST_S / 3 if request.quick else MPI_LONGEST_S
                    mpi_s = time_mpi(comm, job.n, job.dtype, fastest_dense(job, speeds["dense"])(job), longest_s)
                if comm.rank == 0:
                    record = predictions(request, job, speeds, mpi_s) | {"hosts": hosts}
                    record["not_predicted"] += [other for other in request.methods if other not in plain]
                    steps.print("\n".join((*report.heading(record), *report.rows(record, record["rows"]))))
            elif comm.rank == 0:
                found = predictions(request, job, {"dense": speeds["dense"], name: speeds[name]}, mpi_s, (name,))
                record["speeds"] |= found["speeds"]
                record["rows"] += found["rows"]
                steps.print("\n".join(report.rows(record, found["rows"])))
            wait(comm.mpi_comm.Ibarrier(), PREDICTING_S, waiting)
        return record | {"left_out": left_out} if record else record


def _measure_links(
    request: AdviseRequest, comm: Communicator, steps: Steps, file: TextIO | None, has_nodes: bool
) -> tuple[LinkModel, NodeSpeed | None]:
    """Return the network, which is measured unless the request has one, and the speed of sums within nodes."""
    network = request.network
    if network is None:
        steps.begin("measuring the network")
        network = measure_network(comm)
    write(comm, "--save", file, json.dumps(asdict(network), indent=1) + "\n")
    if not has_nodes:
        return network, None
    steps.begin("measuring sums within nodes")
    return network, measure_nodes(comm, request.count, request.dtype, request.quick)


def predicted_methods(request: AdviseRequest, sizes: Sequence[int], piece_bytes: int) -> list[str]:
    """Return the requested methods that are predicted for one of these numbers of ranks, the job's first."""
    names = [
        name
        for name in request.methods
        if any(is_predicted(METHODS[name], size, request.count, request.dtype, piece_bytes) for size in sizes)
    ]
    if set(names) <= {"dense"}:
        others = ", ".join(name for name in request.methods if name != "dense")
        raise UsageError(
            f"--methods {others}: each rank sends to all others, which is predicted for {MOST_WALKED} ranks or fewer, "
            f"not for {sizes[0]}: name another method, such as marsit, or fewer --ranks"
        )
    return names


def _duration(n_steps: int, quick: bool) -> str:
    """Return the expected time in words."""
    if quick:
        return "at most a minute, if the kernels are compiled"
    return f"{n_steps} measurements of {LEAST_S} to {MOST_S} s each, about {n_steps * (LEAST_S + MOST_S) / 2:.0f} s"


class Countdown:
    """Time that is left for measurements; all ranks decide by the clock of rank 0."""

    def __init__(self, comm: Communicator, limit_s: float) -> None:
        self._comm, self._limit_s, self._start, self._longest_s = comm, limit_s, time.perf_counter(), 0.0

    def has_time(self) -> bool:
        """Return True if another measurement, as long as the longest so far, ends within the limit; collective."""
        if math.isinf(self._limit_s):
            return True
        ends_s = time.perf_counter() - self._start + self._longest_s
        answer: bool = self._comm.broadcast_object(ends_s < self._limit_s)
        return answer

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time a measurement."""
        start = time.perf_counter()
        yield
        self._longest_s = max(self._longest_s, time.perf_counter() - start)


def predictions(
    request: AdviseRequest,
    job: PredictedJob,
    speeds: Mapping[str, Speed],
    mpi_s: float | None,
    names: Collection[str] | None = None,
) -> Record:
    """Return the record of these methods, or of all with a speed; `mpi_s` is the time of MPI's own all-reduce."""
    dense = fastest_dense(job, speeds["dense"])
    methods = {name: (METHODS[name], speed) for name, speed in speeds.items() if names is None or name in names}
    return {
        "ranks": job.size,
        "threads": request.threads,
        "ranks_per_node": request.ranks_per_node,
        "count": job.n,
        "dtype": job.dtype,
        "compute_s": request.compute_s,
        "network": asdict(job.network),
        "nodes": None if job.nodes is None else asdict(job.nodes),
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
                "per_node": way.per_node,
                "compared": way.method in COMPARED,
                "seconds": (seconds := way.seconds(job)),
                "step_s": seconds + request.compute_s,
                "break_even_bytes_s": None if way.method == "dense" else break_even(way, dense, job),
            }
            for topology, way in ways(job, methods, speeds["dense"])
        ],
        "not_predicted": list(WALKED) if job.size > MOST_WALKED else [],
    }


def time_mpi(comm: Communicator, n: int, dtype: str, expected_s: float, longest_s: float = MPI_LONGEST_S) -> float:
    """Return the median time of MPI's own all-reduce on the slowest rank, extrapolated for long vectors."""
    part = min(1.0, longest_s / max(expected_s * (MPI_CALLS + 1), 1e-9))
    count = max(1, int(n * part))
    kind = "float32" if dtype == "float16" else dtype
    x, out = aligned_empty(count, kind, 64), aligned_empty(count, kind, 64)
    x[:] = 1
    seconds = alternate({"mpi": partial(comm.mpi_comm.Allreduce, x, out)}, MPI_CALLS, 1, comm)["mpi"]
    return float(np.median(seconds)) * n / count
