"""``mpicomp doctor`` says whether a job can run here, and what would slow it down.

Alone it examines one process, under ``mpirun`` the whole job: rank 0 reports for all. The exit status is 0 where jobs
can run, warnings or not, and 1 where they cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from mpicomp.cli.doctor import environment, gpu, job, library, start
from mpicomp.cli.doctor.finding import Finding, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``mpicomp doctor`` to `parser`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--deadline", type=float, default=30.0, help="seconds to wait for the other ranks (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Examine, report on rank 0, and return the exit status, the same on every rank."""
    obstacles = start.findings(os.environ)
    if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        for finding in obstacles:  # at once, as MPI may end this process
            print(finding.line(), file=sys.stderr, flush=True)
    mpi, loaded = library.load()
    if mpi is None:
        return _report([*obstacles, loaded, *environment.findings(1, len(os.sched_getaffinity(0)))], args.json)
    comm = mpi.COMM_WORLD
    launcher = examine("launcher", lambda: job.launcher(comm.size, os.environ))
    found = [*obstacles, loaded, *library.findings(mpi), launcher, job.messages(comm, args.deadline)]
    if found[-1].status == "FAIL":
        # The other ranks cannot be asked any more, and MPI would wait for them at exit.
        status = _report(found, args.json)
        sys.stdout.flush()
        comm.Abort(status)
    places = comm.allgather(job.here(mpi.Get_library_version().split(",")[0].rstrip("\0")))
    found += job.hosts(places)
    here = [place.cores for place in places if place.host == places[comm.rank].host]
    found += environment.findings(len(here), len(frozenset[int]().union(*here)))
    found += comm.bcast(gpu.findings() if comm.rank == 0 else None)
    return _report(found, args.json) if comm.rank == 0 else _status(found)


def _report(found: list[Finding], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"can_run": _status(found) == 0, "findings": list(map(asdict, found))}))
    else:
        print("\n".join(finding.line() for finding in found))
    return _status(found)


def _status(found: list[Finding]) -> int:
    return int(any(finding.status == "FAIL" for finding in found))
