"""Parts that programs on all ranks of a job share: their begin, their end, and options that are counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from mpi4py import MPI

import mpicomp
from apps.train.agreement import JobError, fail, on_rank_0
from apps.train.options import positive
from collectives import Communicator
from collectives.errors import CollectiveError, CollectiveMismatch
from mpicomp.pipeline import PipelineError

Parse = Callable[[], argparse.Namespace]
Work = Callable[[argparse.Namespace, Communicator], None]


def run_program(parse: Parse, work: Work) -> int:
    """Read the options, do the work and return the exit status; collective over all ranks of the job."""
    mpicomp.install_abort_hook()
    try:
        found = on_rank_0(parse)
    except SystemExit as stop:
        return fail(MPI.COMM_WORLD, None, status=int(stop.code or 0))
    torch.set_num_threads(1)  # more of them would fight over the cores, and change the order of sums
    try:
        link, ranks_per_node = (getattr(found, name, None) for name in ("link", "ranks_per_node"))
        comm = Communicator(link=link, ranks_per_node=ranks_per_node)
    except ValueError as error:
        return fail(MPI.COMM_WORLD, f"--link {found.link}: {error}")
    with comm:
        try:
            work(found, comm)
        # errors that all ranks have are printed by rank 0; a rank that misses another one ends the job
        except (JobError, PipelineError, CollectiveMismatch) as error:
            return fail(comm.mpi_comm, str(error))
        except CollectiveError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            comm.mpi_comm.Abort(1)
    return 0


def add_counts(add: Callable[..., Any], defaults: object, described: Iterable[tuple[str, str]]) -> None:
    """Add options that are whole numbers of at least 1, whose defaults are the attributes of these names."""
    for option, told in described:
        name = option.removeprefix("--").replace("-", "_")
        add(option, type=positive, default=getattr(defaults, name), metavar="N", help=told)


def fields_of(kind: type[Any], found: argparse.Namespace) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in vars(found).items() if name in names}
