"""Arguments of a communicator: validated, agreed on, and refused on every rank where one rank's cannot be used."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from mpi4py import MPI

from collectives import launcher
from collectives.annotations import Bytes
from collectives.arrays import gpu_mpi
from collectives.communicator.checked_messages import validate_checksums
from collectives.communicator.nodes import NodeLabel, NodeLayout, find_layouts, validate_ranks_per_node
from collectives.communicator.slow_link import link_of, linked_node, validate_link
from collectives.consistency.descriptions import gather_objects, gather_texts
from collectives.cost.link import LinkModel
from collectives.cost.rate import EmulatedLink
from collectives.errors import CollectiveMismatch, CollectiveTimeout, LauncherMismatch, NotARank, marked, reword
from collectives.execution.workers import MOST_THREADS, Workers
from collectives.process_end import install_unless_attended
from collectives.progress.polling import wait
from collectives.quoting import list_ranks, one_line
from collectives.recovery.fault_tolerance import CURE, is_tolerant
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TopologyName
from collectives.schedules.registry import topology as topology_of
from collectives.trace.recorder import Trace, compare_clocks

REFUSING_S = 0.5  # how long a rank that refuses waits for ranks that come at the same time
# So many bits differ that a damaged byte is still known: no rank knows yet whether messages have checksums.
_TAKES_PART, _REFUSES = 1, 255
LONGEST_PIECE_BYTES = 1 << 30  # MPI counts elements of a message in 32 bits
SILENCE_S = 60.0  # default within a collective, where all ranks are at work
ARRIVAL_S = 1800.0  # default for a rank that evaluates or saves while the others wait in their next call
EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"  # environment variable with Open MPI's limit for TCP
USUAL_EAGER_BYTES = 65_536
HEADROOM = 8_192  # the limit includes a message's headers
# Shorter pieces cost more calls than they spare, longer ones overlap less.
LEAST_EAGER_BYTES, MOST_EAGER_BYTES = 8_192, 262_144
ROUTES = ("auto", "mpi")  # have names like topologies
_PROBLEM = "\0"  # first character of a text with the reason why a rank knows no network


class CommunicatorArguments(NamedTuple):
    """Arguments of a communicator, with which it can be made."""

    parent: MPI.Comm
    topology: TopologyName | Topology
    timeout: float
    arrival_timeout: float
    workers: Workers | None
    link: EmulatedLink | None
    ranks_per_node: int | None
    checksums: bool
    copy_residuals_every: int | None


def validate_arguments(
    mpi_comm: MPI.Comm | None,
    topology: TopologyName | Topology,
    timeout: float | None,
    arrival_timeout: float | None,
    piece_bytes: int | None,
    threads: int,
    alone: bool,
    abort_hook: bool,
    link: EmulatedLink | str | None = None,
    ranks_per_node: int | None = None,
    on_failure: str = "raise",
    checksums: object = False,
    spares: object = 0,
    trace: object = None,
    copy_residuals_every: object = None,
) -> CommunicatorArguments:
    """Return the arguments of `Communicator`, ready for use.

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
        emulated = validate_link(link)
        if emulated is not None and link_of(parent) is not None:
            raise ValueError(f"mpi_comm has an emulated link of {link_of(parent)} already: leave out link")
        _validate_on_failure(on_failure, parent)
        others = {"link": emulated, "trace": trace, "copy_residuals_every": copy_residuals_every}
        _validate_spares(spares, on_failure, parent, others)
        every = _validate_copies(copy_residuals_every, on_failure)
        checked = validate_checksums(checksums, topology)
        workers = Workers(int(threads)) if threads > 1 else None
        per_node = validate_ranks_per_node(ranks_per_node)
        if per_node is None:
            per_node = linked_node(parent) if emulated is None else NodeLabel(parent.rank)
        limits = timeouts(timeout, arrival_timeout)
        route = _topology(topology, parent)
        return CommunicatorArguments(parent, route, *limits, workers, emulated, per_node, checked, every)
    except (TypeError, ValueError, LauncherMismatch) as error:
        refuse(parent)
        raise marked(reword(error, f"rank {parent.rank} of {parent.size}: {error}")) from None


def _validate_on_failure(on_failure: str, parent: MPI.Comm) -> None:
    if on_failure not in ("raise", "regroup"):
        raise ValueError(f"on_failure is {on_failure!r}: choose 'raise' or 'regroup'")
    if on_failure == "regroup" and parent.size > 1 and not is_tolerant(parent):
        raise ValueError(f"on_failure='regroup' needs an MPI whose ranks outlive others: {CURE}")


def _validate_spares(spares: object, on_failure: str, parent: MPI.Comm, others: Mapping[str, object]) -> None:
    if isinstance(spares, bool) or not isinstance(spares, Integral):
        raise TypeError(f"spares must be a whole number, not {spares!r}")
    if not 0 <= int(spares) < parent.size:
        raise ValueError(f"spares must lie in 0 .. {parent.size - 1}, since a rank has to train, not {spares}")
    if spares and on_failure != "regroup":
        raise ValueError(f"spares={spares} need on_failure='regroup': without it the job ends with the first dead rank")
    given = [name for name, option in others.items() if option is not None]
    if spares and given:
        raise ValueError(f"spares={spares} cannot be combined with {given[0]}: leave one out")


def _validate_copies(every: object, on_failure: str) -> int | None:
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, Integral):
        raise TypeError(f"copy_residuals_every must be a number of steps or None, not {every!r}")
    if every < 1:
        raise ValueError(f"copy_residuals_every must be at least 1, not {every}")
    if on_failure != "regroup":
        raise ValueError("copy_residuals_every has no use without on_failure='regroup': pass both, or neither")
    return int(every)


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
    if mpi_comm is None:
        return MPI.COMM_WORLD
    if not hasattr(mpi_comm, "Ialltoallv"):
        raise marked(TypeError(f"mpi_comm is {mpi_comm!r}: pass a communicator of mpi4py, or None for COMM_WORLD"))
    if mpi_comm == MPI.COMM_NULL:
        raise marked(ValueError("mpi_comm is COMM_NULL: this rank is no part of it, and makes no communicator"))
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


class Duplicate(NamedTuple):
    """Duplicate of a communicator, the nodes and hosts of its ranks, and a name that is equal on all ranks.

    `damage` is the text of a damaged message that this rank has received, else empty.
    """

    mpi_comm: MPI.Comm
    layout: NodeLayout
    hosts: NodeLayout
    key: str
    damage: str


def duplicate(given: CommunicatorArguments, spares: int, regroups: bool) -> Duplicate:
    """Return a duplicate of the parent in checked arguments, with the layouts of its nodes and hosts.

    Raises
    ------
    CollectiveTimeout
        Names the ranks that do not come.
    ValueError
        The ranks pass different `ranks_per_node`, `checksums`, `spares` or `on_failure`; on every rank.
    """
    assemble(given.parent, given.arrival_timeout)
    mpi_comm = given.parent.Dup()
    mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
    host = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        options = given.ranks_per_node, given.timeout, given.checksums, spares, regroups
        return Duplicate(mpi_comm, *find_layouts(mpi_comm, host, *options))
    except ValueError:
        mpi_comm.Free()
        raise
    finally:
        host.Free()


def assemble(parent: MPI.Comm, timeout_s: float) -> None:
    """Wait until all ranks make a communicator, so that later blocking calls of MPI wait for no rank.

    Every rank sends a byte straight to every other, so that the bytes received show which ranks are there. A rank whose
    arguments are wrong sends another byte; see `refuse`.

    Raises
    ------
    CollectiveTimeout
        The named ranks have not come.
    CollectiveMismatch
        The named ranks refuse.
    """
    if parent.size == 1:
        return
    here = f"rank {parent.rank} of {parent.size}"
    request, came = _swap(parent, _TAKES_PART)

    def waiting() -> str:
        missing = [rank for rank in np.flatnonzero(came == 0).tolist() if rank != parent.rank]
        nothing = f", nothing from {list_ranks(missing)} (look for one that stopped or took another branch)"
        return f"{here}: not all ranks make a communicator{nothing if missing else ''}"

    wait(request, timeout_s, waiting)
    refusing = np.flatnonzero(np.bitwise_count(came) > 4).tolist()
    if refusing:
        raise CollectiveMismatch(
            f"{here}: {list_ranks(refusing)} made no communicator, because of an argument; the error there names it"
        )


def refuse(parent: MPI.Comm) -> None:
    """Notify the other ranks that this one makes no communicator; waits briefly for those that come now."""
    if parent.size > 1:
        with suppress(CollectiveTimeout):
            wait(_swap(parent, _REFUSES)[0], REFUSING_S, lambda: "not all ranks make a communicator")


def _swap(parent: MPI.Comm, mine: int) -> tuple[MPI.Request, Bytes]:
    """Send a byte to every rank; return the request, and an array of the bytes received, 0 for ranks that sent none."""
    leaving, landing = np.full(parent.size, mine, np.uint8), np.zeros(parent.size, np.uint8)
    counts = np.ones(parent.size, np.int32)
    return parent.Ialltoallv([leaving, counts, MPI.BYTE], [landing, counts, MPI.BYTE]), landing


def eager_piece_bytes(comm: MPI.Comm, timeout_s: float) -> int:
    """Return the length of the longest message between nodes that all ranks send eagerly; collective.

    Each rank reads the environment of its process.

    Raises
    ------
    CollectiveTimeout, PeerFailure
    """
    limit = os.environ.get(EAGER_LIMIT, "")
    mine = int(limit) - HEADROOM if limit.isdecimal() else USUAL_EAGER_BYTES - HEADROOM
    return int(min(gather_objects(comm, min(MOST_EAGER_BYTES, max(LEAST_EAGER_BYTES, mine)), timeout_s)))


def agree_on_network(comm: MPI.Comm, network: LinkModel | str | Path | None, timeout_s: float) -> LinkModel | None:
    """Return the network that all ranks name, read from a file if need be; None if no rank names one. Collective.

    Raises
    ------
    ValueError
        A rank cannot read it, or ranks know different ones; on every rank.
    """
    known, text, here = None, "", f"rank {comm.rank} of {comm.size}"
    if network is not None:
        try:
            known = network if isinstance(network, LinkModel) else LinkModel.load(network)
            text = repr(known)
        except (OSError, TypeError, ValueError) as error:
            text = f"{_PROBLEM}{here}: network={one_line(network)!r} cannot be used: {one_line(error)}"
    texts = gather_texts(comm, text, timeout_s)
    problem = next((found.removeprefix(_PROBLEM) for found in texts if found.startswith(_PROBLEM)), "")
    if problem:
        raise ValueError(problem)
    if len(set(texts)) > 1:
        other = next(rank for rank, found in enumerate(texts) if found != texts[0])
        raise ValueError(
            f"ranks 0 and {other} know different networks, {texts[0] or 'none'} and {texts[other] or 'none'}: "
            "give all ranks the same"
        )
    return known


def open_trace(comm: MPI.Comm, folder: str | Path, timeout_s: float, close: Callable[[], None]) -> Trace:
    """Begin to record all calls of a new communicator; collective. `close` is called if that fails.

    Raises
    ------
    OSError
        A rank cannot write to the folder; on every rank.
    CollectiveTimeout, PeerFailure
    """
    here = f"rank {comm.rank} of {comm.size}"
    missing = f"{here}: not all ranks open a trace; pass trace= on every rank or on none"
    wait(comm.Ibarrier(), timeout_s, lambda: missing)
    trace, problem = None, ""
    try:
        trace = Trace(Path(folder), comm.rank, comm.size)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        problem = f"{here}, trace={str(folder)!r}: {cause}; name a folder that every rank can write, for this alone"
    problem = next(filter(None, gather_texts(comm, problem, timeout_s)), "")
    if trace is None or problem:
        if trace is not None:
            trace.discard()
        close()
        raise OSError(problem)
    trace.readings = [compare_clocks(comm, trace.clock, timeout_s)]
    beginning = np.array([trace.clock(), time.time()])
    wait(comm.Ibcast(beginning, 0), timeout_s, lambda: f"{here}: rank 0 does not begin the trace")
    trace.origin, trace.run = beginning.tolist()
    return trace
