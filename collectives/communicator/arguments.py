"""Arguments of a communicator: validated, agreed on, and refused on every rank where one rank's cannot be used."""

from __future__ import annotations

import atexit
import os
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import cast

from mpi4py import MPI

from collectives import launcher
from collectives.abort_hook import install_unless_attended
from collectives.arrays import gpu_mpi
from collectives.checksums.checked_messages import validate_checksums, with_checksums
from collectives.cost.link import LinkModel
from collectives.emulation.slow_comm import link_of, linked_node, slow_down, validate_link
from collectives.errors import LauncherMismatch, NotARank, marked, reword
from collectives.execution.workers import MOST_THREADS, Workers
from collectives.group.opening import GroupOptions, refuse
from collectives.losses import validate_losses
from collectives.nodes.layout import validate_ranks_per_node
from collectives.recovery.arguments import validate_copies
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TopologyName
from collectives.schedules.registry import topology as topology_of
from collectives.trace.opening import open_history, opener_of

LONGEST_PIECE_BYTES = 1 << 30  # MPI counts elements of a message in 32 bits
SILENCE_S = 60.0  # default within a collective, where all ranks are at work
ARRIVAL_S = 1800.0  # default for a rank that evaluates or saves while the others wait in their next call
ROUTES = ("auto", "mpi")  # have names like topologies


def validate_arguments(
    mpi_comm: MPI.Comm | None,
    topology: TopologyName | Topology,
    timeout: float | None,
    arrival_timeout: float | None,
    piece_bytes: int | None,
    threads: int,
    alone: bool,
    abort_hook: bool,
    link: object = None,
    ranks_per_node: int | None = None,
    on_failure: str = "raise",
    checksums: object = False,
    spares: object = 0,
    trace: str | Path | None = None,
    copy_residuals_every: object = None,
    verify: bool = True,
    network: LinkModel | str | Path | None = None,
) -> GroupOptions:
    """Return the arguments of `Communicator`, ready for use.

    Raises
    ------
    NotARank
        See `require_rank`.
    TypeError, ValueError, LauncherMismatch
        An argument cannot be used, or MPI has not joined all processes; the other ranks raise CollectiveMismatch.
    """
    require_rank(alone)
    parent = _parent(mpi_comm)
    if abort_hook and isinstance(parent, MPI.Comm) and parent.size == MPI.COMM_WORLD.size > 1:
        install_unless_attended()
    try:
        _reject_topology(mpi_comm)
        _require_whole_job(parent, alone)
        _validate_piece_bytes(piece_bytes)
        n_threads = _validate_threads(threads)
        gpu_mpi.require_if_on(parent)
        own_link = validate_link(link, parent)
        others = {"link": own_link, "trace": trace, "copy_residuals_every": copy_residuals_every}
        losses = validate_losses(on_failure, spares, parent, others)
        every = validate_copies(copy_residuals_every, on_failure)
        checks = validate_checksums(checksums, topology)
        per_node = validate_ranks_per_node(ranks_per_node, linked_node(parent, own_link))
        limits = timeouts(timeout, arrival_timeout)
        return GroupOptions(
            parent, _topology(topology, parent), *limits, Workers(n_threads) if n_threads > 1 else None,
            own_link or link_of(parent), per_node, checks, every, verify, piece_bytes, network,
            opener_of(trace), open_history, losses, partial(with_checksums, checks=checks),
            partial(slow_down, link=own_link),
        )  # fmt: skip
    except (TypeError, ValueError, LauncherMismatch) as error:
        refuse(parent)
        raise marked(reword(error, f"rank {parent.rank} of {parent.size}: {error}")) from None


def _reject_topology(mpi_comm: object) -> None:
    """Raise TypeError for a topology as the first argument, with which the job's ranks are taken."""
    if _is_topology(mpi_comm):
        raise TypeError(f"the first argument is mpi_comm: write Communicator(topology={mpi_comm!r})")


def _is_topology(mpi_comm: object) -> bool:
    return isinstance(mpi_comm, str) or hasattr(mpi_comm, "plan")


def _require_whole_job(parent: MPI.Comm, alone: bool) -> None:
    if parent == MPI.COMM_WORLD and not alone and MPI.Comm.Get_parent() == MPI.COMM_NULL:
        problem = launcher.problem(parent.size, os.environ)
        if problem:
            raise LauncherMismatch(problem)


def _validate_piece_bytes(piece_bytes: int | None) -> None:
    if piece_bytes is not None and not 1 <= piece_bytes <= LONGEST_PIECE_BYTES:
        raise ValueError(f"piece_bytes must lie in 1 .. {LONGEST_PIECE_BYTES}, not {piece_bytes}")


def _validate_threads(threads: object) -> int:
    if isinstance(threads, bool) or not isinstance(threads, Integral):
        raise TypeError(f"threads must be a whole number, not {threads!r}")
    if not 1 <= int(threads) <= MOST_THREADS:
        raise ValueError(f"threads must lie in 1 .. {MOST_THREADS}, not {threads}")
    return int(threads)


def require_rank(alone: bool = False) -> None:
    """Raise NotARank in a process that a rank has started, unless it is to be `alone`: it then is a job of its own."""
    problem = launcher.problem_of_child()
    if not problem:
        return
    if MPI.Is_initialized() or not (alone or os.environ.get(launcher.ALONE, "0") == "1"):
        raise NotARank(problem)
    launcher.forget_launcher()
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(MPI.Finalize)


def _parent(mpi_comm: object) -> MPI.Comm:
    if mpi_comm is None or _is_topology(mpi_comm):
        return MPI.COMM_WORLD
    if not hasattr(mpi_comm, "Ialltoallv"):
        raise marked(TypeError(f"mpi_comm is {mpi_comm!r}: pass a communicator of mpi4py, or None for COMM_WORLD"))
    if mpi_comm == MPI.COMM_NULL:
        raise marked(ValueError("mpi_comm is COMM_NULL: this rank is no part of it, and makes no communicator"))
    if hasattr(mpi_comm, "Merge"):  # its messages go to the ranks of the other group alone
        raise marked(ValueError("mpi_comm is an inter-communicator between two groups: pass mpi_comm.Merge()"))
    return cast(MPI.Comm, mpi_comm)


def _topology(given: TopologyName | Topology, parent: MPI.Comm) -> TopologyName | Topology:
    if given in ROUTES:
        return given
    found = topology_of(given, ROUTES)
    found.plan(parent.rank, parent.size)
    return found


def timeouts(timeout: float | None, arrival_timeout: float | None) -> tuple[float, float]:
    """Return both timeouts of a communicator, in seconds: the argument, else the environment's, else the default.

    Raises
    ------
    TypeError, ValueError
        A timeout is no positive number; the message names the argument or variable.
    """
    silence_s = _seconds("timeout", timeout, SILENCE_S)
    return silence_s, _seconds("arrival_timeout", arrival_timeout, max(ARRIVAL_S, silence_s))


def _seconds(name: str, given: float | None, default: float) -> float:
    source, value = name, given if given is not None else ""
    if given is None:
        source = f"MPICOMP_{name.upper()}"
        value = os.environ.get(source) or default
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise _error(TypeError if given is not None else ValueError, source, value) from None
    if not seconds > 0:
        raise _error(ValueError, source, value)
    return seconds


def _error(kind: type[Exception], source: str, value: object) -> Exception:
    return kind(f"{source} is {value!r}: it must be a positive number of seconds, such as 60 or inf")
