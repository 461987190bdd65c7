"""What a communicator is made of: its arguments looked at, and refused on every rank where one rank's are wrong."""

from __future__ import annotations

import atexit
import os
from numbers import Integral
from typing import Any, NamedTuple

from mpi4py import MPI

from collectives import children, gpu_mpi, launcher
from collectives.abort import install_unless_attended
from collectives.consistency.call_check import refuse
from collectives.errors import LauncherMismatch, NotARank, marked
from collectives.execution.workers import MOST_THREADS, Workers
from collectives.progress.limits import timeouts
from collectives.schedules.plan import Topology
from collectives.schedules.registry import topology as topology_of

LONGEST_PIECE_BYTES = 1 << 30  # MPI counts elements of a message in 32 bits
ROUTES = ("auto", "mpi")  # by name, as topologies, but none of them


class Made(NamedTuple):
    """Arguments of a communicator that can be used."""

    parent: MPI.Comm
    topology: str | Topology
    timeout: float
    arrival_timeout: float
    workers: Workers | None


def examined(
    mpi_comm: MPI.Comm | None,
    topology: str | Topology,
    timeout: float | None,
    arrival_timeout: float | None,
    piece_bytes: int | None,
    threads: int,
    alone: bool,
    abort_hook: bool,
) -> Made:
    """Arguments of `Communicator`, checked.

    Raises
    ------
    NotARank
        See `require_rank`.
    TypeError, ValueError, LauncherMismatch
        An argument cannot be used, or MPI has not joined all processes; the other ranks raise CollectiveMismatch.
    """
    require_rank(alone)
    swapped = isinstance(mpi_comm, str) or hasattr(mpi_comm, "plan")
    parent = MPI.COMM_WORLD if swapped else _parent(mpi_comm)
    if abort_hook and isinstance(parent, MPI.Comm) and parent.size == MPI.COMM_WORLD.size > 1:
        install_unless_attended()
    try:
        if swapped:
            raise TypeError(f"the first argument is mpi_comm: write Communicator(topology={mpi_comm!r})")
        if parent == MPI.COMM_WORLD and not alone and MPI.Comm.Get_parent() == MPI.COMM_NULL:
            problem = launcher.problem(parent.size, os.environ)
            if problem:
                raise LauncherMismatch(problem)
        if piece_bytes is not None and not 1 <= piece_bytes <= LONGEST_PIECE_BYTES:
            raise ValueError(f"piece_bytes must lie in 1 .. {LONGEST_PIECE_BYTES}, not {piece_bytes}")
        if isinstance(threads, bool) or not isinstance(threads, Integral):
            raise TypeError(f"threads must be a whole number, not {threads!r}")
        if not 1 <= threads <= MOST_THREADS:
            raise ValueError(f"threads must lie in 1 .. {MOST_THREADS}, not {threads}")
        gpu_mpi.require_if_on(parent)
        workers = Workers(int(threads)) if threads > 1 else None
        return Made(parent, _topology(topology, parent), *timeouts(timeout, arrival_timeout), workers)
    except (TypeError, ValueError, LauncherMismatch) as error:
        refuse(parent)
        raise marked(type(error)(f"rank {parent.rank} of {parent.size}: {error}")) from None


def require_rank(alone: bool = False) -> None:
    """Raise NotARank in a process that a rank has started, unless it is to be `alone`: it then is a job of its own."""
    problem = children.problem()
    if not problem:
        return
    if MPI.Is_initialized() or not (alone or os.environ.get(children.ALONE, "0") == "1"):
        raise NotARank(problem)
    children.forget_launcher()
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(MPI.Finalize)


def _parent(mpi_comm: Any) -> MPI.Comm:
    if mpi_comm is None:
        return MPI.COMM_WORLD
    if not hasattr(mpi_comm, "Ialltoallv"):
        raise marked(TypeError(f"mpi_comm is {mpi_comm!r}: pass a communicator of mpi4py, or None for COMM_WORLD"))
    if mpi_comm == MPI.COMM_NULL:
        raise marked(ValueError("mpi_comm is COMM_NULL: this rank is no part of it, and makes no communicator"))
    return mpi_comm  # type: ignore[no-any-return]


def _topology(given: Any, parent: MPI.Comm) -> str | Topology:
    if given in ROUTES:
        return str(given)
    found = topology_of(given, ROUTES)
    found.plan(parent.rank, parent.size)
    return found
