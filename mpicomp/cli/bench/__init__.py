"""``mpicomp bench`` times an all-reduce against MPI's own, alternately in one run, and checks its results.

``mpirun -n 4 mpicomp bench --method marsit --topology ring --count 25e6 --baseline mpi --json bench.json``

The exit status is 0; 1 where a result was wrong or a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from typing import cast

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import Communicator
from collectives.consistency.descriptions import gather_texts
from collectives.execution.workers import MOST_THREADS
from mpicomp.algorithms import NAMES, Algorithm, PerNode
from mpicomp.algorithms.per_node import LOCALS, Local, method_of
from mpicomp.cli.arguments import DTYPES, OptionValue, assignment, choice, counts, integer, seconds
from mpicomp.cli.bench import report
from mpicomp.cli.bench.measure import Subject, allreduce, baseline, checked_call, measure, start_method
from mpicomp.cli.bench.options import ALLREDUCE, BASELINES
from mpicomp.cli.bench.options import add_arguments as add_arguments
from mpicomp.cli.bench.report import Line
from mpicomp.cli.bench.vectors import DEVICES, HOST_ONLY, GpuVectors, Vectors, find_gpu, make_vectors
from mpicomp.cli.command import UsageError, conduct, open_file, require_none, write
from mpicomp.cli.timing import gather

COMMAND = "mpicomp bench"


def run(args: argparse.Namespace) -> int:
    """Run the benchmark on all ranks of the job and return the exit status, the same on every rank."""
    mpicomp.install_abort_hook()
    if args.report is not None:
        from mpicomp.cli.cluster_report import measurement  # which imports this package

        return measurement.run(args)
    return conduct(COMMAND, lambda: _start(args), lambda request, comm: _run(request, comm, args.json))


def _start(args: argparse.Namespace) -> tuple[BenchRequest, Communicator]:
    try:
        request = BenchRequest.parse(args)
    except ValueError as error:  # all ranks have the same arguments
        raise UsageError(str(error)) from error
    try:
        comm = Communicator(
            topology=args.topology,
            timeout=request.timeout_s,
            trace=args.trace,
            network=args.network,
            arrival_timeout=request.timeout_s,
            threads=request.threads,
            link=args.link,
            ranks_per_node=request.ranks_per_node,
        )
    except ValueError as error:
        network = "" if args.network is None else f" --network {args.network}"
        network += "" if args.link is None else f" --link {args.link}"
        raise UsageError(f"--topology {args.topology}{network}: {error}") from error
    except OSError as error:
        raise UsageError(f"--trace {args.trace}: {error}") from error
    return request, comm


def _run(request: BenchRequest, comm: Communicator, path: str | None) -> int:
    status = 0
    method = None if request.algorithm is None else method_of(request.algorithm)
    # a single node has no method to run, unless it is a single rank
    is_exact = method is not request.algorithm and len(comm.layout.sizes) == 1 < comm.size
    every = None if method is None or is_exact else method.full_precision_every
    with open_file(comm, "--json", path) as file:
        gpu = None if request.device == "cpu" else find_gpu(comm, request.algorithm, request.dtype)
        common = {**_common(request, comm), **(HOST_ONLY if gpu is None else gpu.fields)}
        if comm.rank == 0:
            print(report.heading(common), flush=True)
        lines: list[Line] = []
        for count in request.counts:
            vectors = make_vectors(comm, count, request.dtype, None if gpu is None else gpu.device)
            vectors.fill(request.seed, comm.rank)
            line = _line(request, comm, _subject(request, comm, vectors, gpu), vectors, every, common)
            status |= line["check"] not in (None, "ok")
            if comm.rank == 0:
                print("\n".join([report.row(line), *report.failure(line)]), flush=True)
            lines.append(line)
            write(comm, "--json", file, json.dumps(line) + "\n")
        for note in report.footing(lines, every) if comm.rank == 0 else ():
            print(note, flush=True)
    return status


def _subject(request: BenchRequest, comm: Communicator, vectors: Vectors, gpu: GpuVectors | None) -> Subject:
    """Start the all-reduce to be timed; collective. Raises UsageError on every rank if it cannot start."""
    if request.algorithm is None:
        return allreduce(comm)
    subject, problem = None, ""
    try:
        subject = start_method(request.algorithm, comm, vectors.x, "cpu" if gpu is None else gpu.start)
    except (TypeError, ValueError) as error:  # caused by the options, which all ranks share
        given = ", ".join(f"{key}={value}" for key, value in request.options.items())
        raise UsageError(f"--method {request.name} cannot start with --option {given}: {error}") from error
    except (MemoryError, RuntimeError) as error:  # caused by the memory, which may be short on some ranks alone
        problem = f"{comm.here}: --count {vectors.x.size}: {error}; take fewer elements, or fewer ranks per node"
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert subject is not None
    return subject


def _line(
    request: BenchRequest, comm: Communicator, subject: Subject, vectors: Vectors, every: int | None, common: Line
) -> Line:
    """Check and time one vector length; collective."""
    problems: list[str] = []

    def call() -> None:
        if request.check:
            problems.append(checked_call(comm, subject, vectors))
        else:
            subject.call(vectors.given, vectors.target)

    call()  # a full-precision round, if the method has them, unlike the second call
    dense = {"bytes": float(gather(comm, np.array([subject.traffic.bytes_sent], np.float64)).mean())}
    call()
    untimed = 2 + request.warmup
    other, where = baseline(request.baseline, comm, vectors), (vectors.given, vectors.target)
    measured = measure(comm, subject, other, *where, request.repeats, request.warmup)
    call()
    if every is None:
        dense = {}
    else:
        dense |= {"every": every, "calls": sum(step % every == 0 for step in range(untimed, untimed + request.repeats))}
    verdict = next(filter(None, problems), "") if request.check else None
    return report.record(common, vectors.x.size, measured, verdict, dense)


def _common(request: BenchRequest, comm: Communicator) -> Line:
    """Return the fields that all lines share; collective."""
    return {
        "algorithm": request.name,
        "options": request.options,
        "topology": getattr(comm.topology, "name", comm.topology),
        "ranks": comm.size,
        "threads": comm.options.threads,
        "link": None if comm.link is None else str(comm.link),
        "per_node": request.per_node,
        "nodes": list(comm.layout.sizes),
        "dtype": request.dtype,
        "baseline": request.baseline,
        "repeats": request.repeats,
        "warmup": request.warmup,
        "seed": request.seed,
        "mpi_library": MPI.Get_library_version().split(",")[0].strip("\0\n "),
        "hosts": sorted(set(gather_texts(comm.mpi_comm, platform.node(), comm.timeout))),
        "mpicomp_version": mpicomp.__version__,
    }


@dataclass(frozen=True)
class BenchRequest:
    """Parsed arguments."""

    name: str
    algorithm: Algorithm | None  # None: `Communicator.allreduce`
    per_node: str | None  # way of the sums within a node; None: the algorithm is used between all ranks
    ranks_per_node: int | None  # None: all of a host
    options: dict[str, OptionValue]  # of the algorithm, as given
    counts: tuple[int, ...]  # elements of each vector
    dtype: str
    device: str
    baseline: str
    repeats: int
    warmup: int
    check: bool
    seed: int
    threads: int
    timeout_s: float

    @classmethod
    def parse(cls, args: argparse.Namespace) -> BenchRequest:
        """Read the values of the options. Raises ValueError with the option, its value and the values it accepts."""
        if args.minutes is not None and args.report is None:
            raise ValueError(f"--minutes {args.minutes}: only --report goes by a time; give --report too, or --repeats")
        options = dict(map(assignment, args.option))
        return cls(
            args.algorithm,
            _algorithm(args.algorithm, options, args.per_node),
            args.per_node,
            None if args.ranks_per_node is None else integer("--ranks-per-node", args.ranks_per_node, 1),
            options,
            counts(args.count),
            choice("--dtype", args.dtype, DTYPES),
            choice("--device", args.device, DEVICES),
            choice("--baseline", args.baseline, BASELINES),
            integer("--repeats", args.repeats, 1),
            integer("--warmup", args.warmup, 0),
            args.check,
            integer("--seed", args.seed, 0),
            integer("--threads", args.threads, 1, MOST_THREADS),
            seconds("--timeout", args.timeout),
        )


def _algorithm(name: str, options: dict[str, OptionValue], per_node: str | None) -> Algorithm | None:
    if name == ALLREDUCE:
        if options:
            raise ValueError(f"--method {ALLREDUCE} has no options, not {', '.join(options)}")
        if per_node is not None:
            raise ValueError(f"--method {ALLREDUCE} is no method: take --method dense with --per-node {per_node}")
        return None
    choice("--method", name, (*NAMES, ALLREDUCE))
    try:
        made = mpicomp.algorithm(name, **options)
        return made if per_node is None else PerNode(made, cast(Local, choice("--per-node", per_node, LOCALS)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"--method {name} cannot be made with these options: {error}") from error
