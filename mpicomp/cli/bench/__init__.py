"""``mpicomp bench`` times an all-reduce against MPI's own, alternately in one run, and checks its results.

``mpirun -n 4 mpicomp bench --algorithm marsit --topology ring --count 25e6 --baseline mpi --json bench.json``

The exit status is 0; 1 where a result was wrong or a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import platform
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomp
from collectives import Communicator
from collectives.consistency.call_check import gather_texts
from collectives.memory import aligned_empty
from mpicomp.algorithms import NAMES
from mpicomp.cli.arguments import DTYPES
from mpicomp.cli.bench import report
from mpicomp.cli.bench.check import TILE, checked_call
from mpicomp.cli.bench.measure import Subject, Vector, aggregated, allreduce, baseline, measure
from mpicomp.cli.bench.request import ALLREDUCE, BASELINES, Request
from mpicomp.cli.rank0 import UsageError, conduct, open_file, require_none

COMMAND = "mpicomp bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp bench``. Their values are read in `run`, where one rank can speak for all."""
    methods = ", ".join((*NAMES, ALLREDUCE))
    parser.add_argument("--algorithm", default="marsit", help=f"{methods} (default %(default)s)")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="of the algorithm: full_precision_every=None"
    )
    parser.add_argument("--topology", default="auto", help="schedule of the all-reduce, by name (default %(default)s)")
    parser.add_argument("--network", metavar="FILE", help='what topology "auto" goes by, from mpicomp advise --save')
    parser.add_argument(
        "--count", default="25e6", help="elements: 25e6, or several as 1e3,1e6, or min:max:factor (default %(default)s)"
    )
    parser.add_argument("--dtype", default="float32", help=f"{', '.join(DTYPES)} (default %(default)s)")
    parser.add_argument(
        "--baseline",
        default="mpi",
        help=f"{', '.join(BASELINES)}: what to time in turn with it: MPI_Allreduce, or the dense mean over "
        "the same topology (default %(default)s)",
    )
    parser.add_argument("--repeats", default="20", help="timed calls of each (default %(default)s)")
    parser.add_argument("--warmup", default="3", help="calls of each before (default %(default)s)")
    parser.add_argument(
        "--check", action=argparse.BooleanOptionalAction, default=True, help="check results before and after timing"
    )
    parser.add_argument("--seed", default="0", help="of the vectors (default %(default)s)")
    parser.add_argument(
        "--threads", default="1", help="of each rank, which encode and decode pieces (default %(default)s)"
    )
    parser.add_argument("--timeout", default="60", help="seconds a silent rank is awaited (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write one JSON line per vector length")
    parser.add_argument("--trace", metavar="DIR", help="write a trace of each rank's calls, for mpicomp trace")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark on all ranks of the job and return the exit status, the same on every rank."""
    mpicomp.install_abort_hook()
    return conduct(COMMAND, lambda: _start(args), lambda request, comm: _run(request, comm, args.json))


def _start(args: argparse.Namespace) -> tuple[Request, Communicator]:
    try:
        request = Request.parse(args)
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
        )
    except ValueError as error:
        network = "" if args.network is None else f" --network {args.network}"
        raise UsageError(f"--topology {args.topology}{network}: {error}") from error
    except OSError as error:
        raise UsageError(f"--trace {args.trace}: {error}") from error
    return request, comm


def _run(request: Request, comm: Communicator, path: str | None) -> int:
    status = 0
    every = getattr(request.algorithm, "full_precision_every", None)
    with open_file(comm, "--json", path) as file:
        common = _common(request, comm)
        if comm.rank == 0:
            print(report.heading(common), flush=True)
        for count in request.counts:
            x, out = _vectors(comm, count, request.dtype)
            _fill(x, request.seed, comm.rank)
            line = _line(request, comm, _subject(request, comm, x), x, out, every, common)
            status |= line["check"] not in (None, "ok")
            if comm.rank == 0:
                print("\n".join([report.row(line), *report.notes(line, every)]), flush=True)
            if file is not None:
                file.write(json.dumps(line) + "\n")
                file.flush()
    return status


def _subject(request: Request, comm: Communicator, x: Vector) -> Subject:
    if request.algorithm is None:
        return allreduce(comm)
    try:
        return aggregated(request.algorithm, comm, x)
    except (TypeError, ValueError) as error:  # of the options, which all ranks share
        given = ", ".join(f"{key}={value}" for key, value in request.options.items())
        raise UsageError(f"--algorithm {request.name} cannot start with --option {given}: {error}") from error


def _line(
    request: Request, comm: Communicator, subject: Subject, x: Vector, out: Vector, every: int | None,
    common: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Check and time one vector length; collective."""
    problems: list[str] = []

    def call() -> None:
        if request.check:
            problems.append(checked_call(comm, subject, x, out))
        else:
            subject.call(x, out)

    call()  # of a method with full-precision rounds, the first is one; the second is not
    dense = {"bytes": subject.traffic.bytes_sent}
    call()
    untimed = 2 + request.warmup
    measured = measure(comm, subject, baseline(request.baseline, comm, x), x, out, request.repeats, request.warmup)
    call()
    if every is None:
        dense = {}
    else:
        dense |= {"every": every, "calls": sum(step % every == 0 for step in range(untimed, untimed + request.repeats))}
    return report.record(common, x.size, measured, next(filter(None, problems), "") if request.check else None, dense)


def _vectors(comm: Communicator, count: int, dtype: str) -> tuple[Vector, Vector]:
    """Two vectors; UsageError on every rank if there is no room for them; collective."""
    vectors, problem = None, ""
    try:
        vectors = aligned_empty(count, dtype, 64), aligned_empty(count, dtype, 64)
    except (MemoryError, ValueError) as error:
        problem = (
            f"rank {comm.rank} of {comm.size}: --count {count}: {error}; take fewer elements, or fewer ranks per node"
        )
    require_none(comm.mpi_comm, problem, comm.timeout)
    assert vectors is not None
    return vectors


def _fill(x: Vector, seed: int, rank: int) -> None:
    """Normally distributed numbers, others on each rank."""
    random = np.random.default_rng((seed, rank))
    for start in range(0, x.size, TILE):
        x[start : start + TILE] = random.standard_normal(min(TILE, x.size - start), np.float32)


def _common(request: Request, comm: Communicator) -> dict[str, Any]:
    """What all lines share; collective."""
    return {
        "algorithm": request.name,
        "options": request.options,
        "topology": getattr(comm.topology, "name", comm.topology),
        "ranks": comm.size,
        "threads": comm.threads,
        "dtype": request.dtype,
        "baseline": request.baseline,
        "repeats": request.repeats,
        "warmup": request.warmup,
        "seed": request.seed,
        "mpi_library": MPI.Get_library_version().split(",")[0].strip("\0\n "),
        "hosts": sorted(set(gather_texts(comm.mpi_comm, platform.node(), comm.timeout))),
        "mpicomp_version": mpicomp.__version__,
    }
