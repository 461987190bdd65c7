"""``mpicomp doctor`` reports whether a job can run here, and causes that would slow it down.

Alone it examines one process, under ``mpirun`` the whole job: rank 0 reports for all. The exit status is 0 where jobs
can run, warnings or not, and 1 where they cannot.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from mpicomp.cli.arguments import seconds
from mpicomp.cli.doctor import environment, gpu, mpi
from mpicomp.cli.doctor.finding import examine, report, status

USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp doctor`` to `parser`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--deadline", default="30", help="seconds to wait for the other ranks (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Examine, report on rank 0, and return the exit status, the same on every rank."""
    reports = os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0"
    try:
        deadline_s = seconds("--deadline", args.deadline)
    except ValueError as error:  # all ranks have the same arguments
        if reports:
            print(f"mpicomp doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    found = environment.obstacles(os.environ)
    if reports:
        for finding in found:  # at once, as MPI may end this process
            print(finding.line(), file=sys.stderr, flush=True)
    if not os.environ.get("HOME"):
        os.environ["HOME"] = tempfile.gettempdir()  # without it Open MPI ends the process before the other findings
    module, loaded = mpi.load()
    if module is None:
        return report([*found, loaded, *environment.findings(1, len(os.sched_getaffinity(0)))], args.json)
    comm = module.COMM_WORLD
    launcher = examine("launcher", lambda: mpi.launcher(comm.size, os.environ))
    found += [loaded, *mpi.library(module), launcher, mpi.messages(comm, deadline_s)]
    if found[-1].status == "FAIL":
        # The other ranks do not respond, and MPI would wait for them at exit.
        exit_status = report(found, args.json)
        sys.stdout.flush()
        comm.Abort(exit_status)
    places = comm.allgather(mpi.here(module.Get_library_version().split(",")[0].rstrip("\0")))
    found += mpi.hosts(places)
    here = [place.cores for place in places if place.host == places[comm.rank].host]
    on_host = [place.host for place in places]
    seen = comm.allgather(gpu.seen(on_host[: comm.rank].count(on_host[comm.rank])))
    found += gpu.of_ranks(on_host, seen)
    found += environment.findings(len(here), len(frozenset[int]().union(*here)))
    found += comm.bcast(gpu.findings() if comm.rank == 0 else None)
    return report(found, args.json) if comm.rank == 0 else status(found)
