"""Opening of a group: its duplicate of MPI's communicator, once all ranks are there, and the ranks' agreements."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.annotations import Bytes
from collectives.consistency.descriptions import gather_objects, gather_texts
from collectives.cost.link import LinkModel
from collectives.cost.rate import EmulatedLink
from collectives.errors import CollectiveMismatch, CollectiveTimeout
from collectives.execution.observer import History, Observer
from collectives.execution.workers import Workers
from collectives.nodes.layout import NodeLayout, find_layouts
from collectives.progress.polling import wait
from collectives.quoting import list_ranks, one_line
from collectives.schedules.plan import Topology
from collectives.schedules.registry import TopologyName

if TYPE_CHECKING:
    from collectives.group.calls import Calls
    from collectives.losses import Losses

REFUSING_S = 0.5  # how long a rank that refuses waits for ranks that come at the same time
# So many bits differ that a damaged byte is still known: no rank knows yet whether messages have checksums.
_TAKES_PART, _REFUSES = 1, 255
EAGER_LIMIT = "OMPI_MCA_btl_tcp_eager_limit"  # environment variable with Open MPI's limit for TCP
USUAL_EAGER_BYTES = 65_536
HEADROOM = 8_192  # the limit includes a message's headers
# Shorter pieces cost more calls than they spare, longer ones overlap less.
LEAST_EAGER_BYTES, MOST_EAGER_BYTES = 8_192, 262_144
_PROBLEM = "\0"  # first character of a text with the reason why a rank knows no network


Observe = Callable[[MPI.Comm, float, str, Callable[[], None]], Observer]
"""Makes the observer of a group from its communicator, timeout and link in words; calls the function if that fails."""


class GroupOptions(NamedTuple):
    """Arguments of a communicator, with which a group can be made; `Communicator` documents them.

    `checked` returns a communicator of MPI with checksums, if messages have them. `slowed` returns one whose messages
    are held back by the links of nodes, if a link is emulated that `parent` does not have.
    """

    parent: MPI.Comm
    topology: TopologyName | Topology
    timeout: float
    arrival_timeout: float
    workers: Workers | None
    link: EmulatedLink | None
    ranks_per_node: int | None
    checksums: bool
    copy_residuals_every: int | None
    verify: bool
    piece_bytes: int | None
    network: LinkModel | str | Path | None
    observe: Observe | None
    history: Callable[[str, int, Sequence[int], Calls], History]
    losses: Losses
    checked: Callable[[Any], Any]
    slowed: Callable[[Any, Sequence[int]], Any]

    @property
    def link_text(self) -> str:
        """The emulated link in words; empty without a link."""
        return "" if self.link is None else str(self.link)

    @property
    def threads(self) -> int:
        """Number of threads that work on pieces."""
        return 1 if self.workers is None else self.workers.threads


class Duplicate(NamedTuple):
    """Duplicate of a communicator, the nodes and hosts of its ranks, and a name that is equal on all ranks.

    `damage` is the text of a damaged message that this rank has received, else empty.
    """

    mpi_comm: MPI.Comm
    layout: NodeLayout
    hosts: NodeLayout
    key: str
    damage: str


def duplicate(options: GroupOptions) -> Duplicate:
    """Return a duplicate of the parent in checked arguments, with the layouts of its nodes and hosts.

    Raises
    ------
    CollectiveTimeout
        Names the ranks that do not come.
    ValueError
        The ranks pass different `ranks_per_node`, `checksums`, `spares` or `on_failure`; on every rank.
    """
    assemble(options.parent, options.arrival_timeout)
    mpi_comm = options.parent.Dup()
    mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
    host = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        compared = options.ranks_per_node, options.timeout, options.checksums, *options.losses.compared
        return Duplicate(mpi_comm, *find_layouts(mpi_comm, host, *compared))
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
