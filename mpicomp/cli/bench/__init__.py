"""``mpicomp bench`` times an all-reduce against MPI's own, alternately in one run, and checks its results.

``mpirun -n 4 mpicomp bench --algorithm marsit --topology ring --count 25e6 --baseline mpi --json bench.json``

The exit status is 0; 1 where a result was wrong or a collective failed; 2 for arguments that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from contextlib import ExitStack
from typing import Any, TextIO

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import mpicomp
from collectives import CollectiveError, Communicator
from collectives.consistency.call_check import gather_texts
from collectives.memory import aligned_empty
from mpicomp.cli.arguments import DTYPES
from mpicomp.cli.bench import report
from mpicomp.cli.bench.check import TILE, checked_call
from mpicomp.cli.bench.measure import measure
from mpicomp.cli.bench.request import ALLREDUCE, BASELINES, Request
from mpicomp.cli.bench.subjects import Aggregated, Allreduce, Subject, baseline
from mpicomp.cli.rank0 import open_file, reject, say

__all__ = ["add_arguments", "run"]

COMMAND = "mpicomp bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp bench``. Their values are read in `run`, where one rank can speak for all."""
    methods = ", ".join((*mpicomp.ALGORITHMS, ALLREDUCE))
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
    parser.add_argument("--timeout", default="60", help="seconds a silent rank is awaited (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write one JSON line per vector length")
    parser.add_argument("--trace", metavar="DIR", help="write a trace of each rank's calls, for mpicomp trace")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark on all ranks of the job and return the exit status, the same on every rank."""
    mpicomp.install_abort_hook()
    world = MPI.COMM_WORLD
    try:
        request = Request.parse(args)
    except ValueError as error:
        # all ranks have the same arguments and therefore the same error: one tells it, and none ends the job before
        return reject(world, COMMAND, str(error))
    try:
        comm = Communicator(world, args.topology, request.timeout_s, trace=args.trace, network=args.network)
    except ValueError as error:
        network = "" if args.network is None else f" --network {args.network}"
        return reject(world, COMMAND, f"--topology {args.topology}{network}: {error}")
    except OSError as error:
        return reject(world, COMMAND, f"--trace {args.trace}: {error}")
    try:
        with comm, ExitStack() as stack:
            file, problem = open_file(comm, "--json", args.json)
            if problem:
                return reject(comm.mpi_comm, COMMAND, problem)
            if file is not None:
                stack.enter_context(file)
            return _run(request, comm, file)
    except CollectiveError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        world.Abort(1)
        return 1


def _run(request: Request, comm: Communicator, file: TextIO | None) -> int:
    common = _common(request, comm)
    say(comm, report.heading(common))
    status = 0
    for count in request.counts:
        vectors, problem = _vectors(comm, count, request.dtype)
        if vectors is None:
            return reject(comm.mpi_comm, COMMAND, problem)
        _fill(vectors[0], request.seed, comm.rank)
        try:
            subject = _subject(request, comm, vectors[0])
        except (TypeError, ValueError) as error:  # of the options, which all ranks share
            given = ", ".join(f"{key}={value}" for key, value in request.options.items())
            problem = f"--algorithm {request.name} cannot start with --option {given}: {error}"
            return reject(comm.mpi_comm, COMMAND, problem)
        line = _line(request, comm, subject, *vectors, common)
        status |= line["check"] not in (None, "ok")
        every = getattr(request.algorithm, "full_precision_every", None)
        say(comm, "\n".join([report.row(line), *report.notes(line, every)]))
        if file is not None:
            file.write(json.dumps(line) + "\n")
            file.flush()
    return status


def _subject(request: Request, comm: Communicator, x: NDArray[Any]) -> Subject:
    if request.algorithm is None:
        return Allreduce(comm, x)
    return Aggregated(request.algorithm, comm, x.size, request.dtype)


def _line(
    request: Request,
    comm: Communicator,
    subject: Subject,
    x: NDArray[Any],
    out: NDArray[Any],
    common: dict[str, Any],
) -> dict[str, Any]:
    """Check and time one vector length; collective."""
    problems: list[str] = []

    def call() -> None:
        if request.check:
            problems.append(checked_call(comm, subject, x, out))
        else:
            subject(x, out)

    call()  # of a method with full-precision rounds, the first is one; the second is not
    dense = {"bytes": subject.total().bytes_sent}
    call()
    untimed = 2 + request.warmup
    measured = measure(comm, subject, baseline(request.baseline, comm, x), x, out, request.repeats, request.warmup)
    call()
    every = getattr(request.algorithm, "full_precision_every", None)
    if every is None:
        dense = {}
    else:
        dense |= {"every": every, "calls": sum(step % every == 0 for step in range(untimed, untimed + request.repeats))}
    return report.record(common, x.size, measured, next(filter(None, problems), "") if request.check else None, dense)


def _vectors(comm: Communicator, count: int, dtype: str) -> tuple[tuple[NDArray[Any], NDArray[Any]] | None, str]:
    """Two vectors; or, on every rank, why there is no room for them; collective."""
    vectors, problem = None, ""
    try:
        vectors = aligned_empty(count, dtype, 64), aligned_empty(count, dtype, 64)
    except (MemoryError, ValueError) as error:
        problem = (
            f"rank {comm.rank} of {comm.size}: --count {count}: {error}; take fewer elements, or fewer ranks per node"
        )
    problem = next(filter(None, gather_texts(comm.mpi_comm, problem, comm.timeout)), "")
    return (None if problem else vectors), problem


def _fill(x: NDArray[Any], seed: int, rank: int) -> None:
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
        "dtype": request.dtype,
        "baseline": request.baseline,
        "repeats": request.repeats,
        "warmup": request.warmup,
        "seed": request.seed,
        "mpi_library": MPI.Get_library_version().split(",")[0].strip("\0\n "),
        "hosts": sorted(set(gather_texts(comm.mpi_comm, platform.node(), comm.timeout))),
        "mpicomp_version": mpicomp.__version__,
    }
