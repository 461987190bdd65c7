"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, cast, overload

import numpy as np
from mpi4py import MPI

from collectives.annotations import Array, Kept
from collectives.arrays.vectors import Flat
from collectives.communicator import arguments, exchanges, objects, other_names, point_to_point, splitting, stopping
from collectives.communicator.nodes import Nodes, open_nodes
from collectives.communicator.operands import NUMBERS, validate_operation, validate_sum
from collectives.cost.link import LinkModel
from collectives.cost.rate import EmulatedLink
from collectives.dense import allreduce as dense
from collectives.errors import marked
from collectives.execution.call import Call, Steps
from collectives.execution.handle import Handle
from collectives.execution.recovery import from_copy
from collectives.execution.traffic import Traffic
from collectives.execution.uncompiled import keep_uncompiled
from collectives.group.group import Group
from collectives.nodes.layout import NodeLabel, NodeLayout
from collectives.recovery.fault_tolerance import repeat_after_deaths
from collectives.recovery.newcomers import admit
from collectives.recovery.parts import make_on_all
from collectives.schedules.plan import Topology, TopologyError
from collectives.schedules.registry import TopologyName
from collectives.trace.recorder import Trace

_Kind = TypeVar("_Kind")
Op = Literal["sum", "mean", "min", "max"] | MPI.Op
NotMean = Literal["sum", "min", "max"] | MPI.Op
Number = bool | int | float | np.bool | np.integer[Any] | np.floating[Any]
_NAMES = (
    *("rank", "size", "local_rank", "local_size", "topology", "link", "mpi_comm", "traffic"),
    *("allreduce", "iallreduce", "broadcast", "allgather", "broadcast_object", "allgather_object", "barrier"),
    *("send", "recv", "isend", "irecv", "split", "grid", "nodes", "members", "select", "stop_requested", "admit"),
    *("start_progress_thread", "close"),
)
"""Names that programs use, which mpicomp help communicator describes."""


class Communicator(Group):
    """Ranks that communicate with each other.

    Parameters
    ----------
    mpi_comm : MPI.Comm, optional
        Always duplicated; None: COMM_WORLD. Making a Communicator is collective.
    topology : str or Topology
        ``"ring"``, ``"segmented-ring"``, ``"torus"``, ``"tree"``, ``"double-tree"``, ``"halving-doubling"``,
        ``"star"``, an instance from `collectives` or of your own class, ``"mpi"`` (dense sums by MPI's own all-reduce,
        everything else as "auto"), or ``"auto"``: by payload size.
    timeout : float, optional
        Seconds without progress within a call before it raises `CollectiveTimeout`. None: the environment's
        ``MPICOMP_TIMEOUT``, else 60.
    verify : bool
        Check before each collective that all ranks make the same call (a few microseconds).
    piece_bytes : int, optional
        Bytes of the longest message; None: by transport. Equal on all ranks.
    network : LinkModel, str or Path, optional
        Model of the ranks' network, or the file that ``mpicomp advise --save`` wrote: "auto" then takes the
        topology that the model of time finds fastest. The same on all ranks.
    trace : str or Path, optional
        Folder for a file per rank with the phases of each call; see `mpicomp help traces`. On all ranks or
        on none.
    arrival_timeout : float, optional
        Seconds that a rank may come later to a call than the others, which warn of it from 15 s on. None: the
        environment's ``MPICOMP_ARRIVAL_TIMEOUT``, else 1800, or `timeout` if that is longer. It holds for making the
        communicator too, and without `verify` for a whole call.
    threads : int
        So many threads encode, merge and decode pieces while the calling one polls; 1: that one does it all. Results
        are the same with any number, and ranks may have different ones. Worth it for methods that compute long
        (quantizers, entropy coding, top-k) on a rank that has several cores to itself; dense sums go on without.
    checksums : bool
        Compare a checksum of each message before its bytes are used, and raise `DamagedMessage` on all ranks if it
        differs; see `mpicomp help tuning`. Equal on all ranks.
    on_failure : "raise" or "regroup"
        After the death of a rank: raise `PeerFailure` on all others, or go on with them. They then have new ranks, and
        calls in flight are made again; see `mpicomp help faults`. The launcher must let ranks outlive others. Equal on
        all ranks.
    spares : int
        The last so many ranks wait, in `admit`, and take the places of ranks that die; with ``on_failure="regroup"``.
        Until then each has a communicator of its own. Equal on all ranks.
    copy_residuals_every : int, optional
        Steps after which each rank sends a copy of its residual to another rank, so that the survivors of its death can
        add it to theirs; with on_failure="regroup". None: no copies. Equal on all ranks. See `mpicomp help faults`.
    link : EmulatedLink or str, optional
        Emulate slow links: messages are held back until a link of this rate, in each direction of each rank, would have
        delivered them. With `ranks_per_node` a node has one such link, and messages within a node are not held back. A
        text such as "100mbit" or "1gbit,50us", which adds a latency. Equal on all ranks; groups by `split` have the
        same link. Results are the same. For trying a method on one machine, see `mpicomp help local`.
    ranks_per_node : int, optional
        Let groups of so many neighbouring ranks of a host count as a node, such as those of a socket, or to try
        `PerNode` on one machine. None: the ranks of a host are a node, and over an emulated link each rank is one.
        Equal on all ranks.
    alone : bool
        Let COMM_WORLD be all there is, even where a launcher started more processes than MPI has joined; so does
        ``MPICOMP_ALONE=1``. In a process that a rank has started, MPI then makes a job of this process alone.
    abort_hook : bool
        Call `install_abort_hook`, if there are several ranks and these are all of the job; not in an interactive
        session, nor under pytest.

    Attributes
    ----------
    rank, size : int
    local_rank, local_size : int
        The same among the ranks of this rank's host.
    mpi_comm : MPI.Comm
        The duplicate.
    link : EmulatedLink or None
        The link that messages are held back by.
    traffic : Traffic
        Cost of all calls of `allreduce` so far.

    Raises
    ------
    CollectiveTimeout
        Names the ranks that do not make a communicator.
    CollectiveMismatch
        Names the ranks that make none because of an argument, of which they raise the error.
    NotARank
        A rank has started this process, such as a worker that loads data.
    LauncherMismatch
        A launcher started more processes than MPI has joined, which would train separate models.
    OSError
        A rank cannot write its trace; on every rank.
    TopologyError
        The topology does not fit this number of ranks.
    TypeError, ValueError
        An argument cannot be used. On every rank: the network cannot be read, or ranks know different ones.

    Notes
    -----
    Most programs pass few options. The last eight have one purpose each: messages that arrive damaged (`checksums`);
    deaths of ranks (`on_failure`, `spares`, `copy_residuals_every`); trials on one machine (`link`, `ranks_per_node`);
    a process's own job and its end (`alone`, `abort_hook`).

    Examples
    --------
    The ranks of a program that ``mpirun`` started, or one rank without it:

    >>> import numpy as np
    >>> import mpicomp
    >>> with mpicomp.Communicator(topology="ring", timeout=120) as comm:
    ...     total = comm.allreduce(np.ones(1000, np.float32))
    ...     first = comm.rank == 0, comm.local_rank < comm.local_size

    Several ranks without ``mpirun``, which are threads:

    >>> mpicomp.run_local(4, lambda comm: f"{comm.here}, {comm.topology}", topology="torus")[3]
    'rank 3 of 4, Torus(rows=None, cols=None)'
    """

    listed = _NAMES

    def __init__(
        self,
        mpi_comm: MPI.Comm | None = None,
        topology: TopologyName | Topology = "auto",
        timeout: float | None = None,
        verify: bool = True,
        piece_bytes: int | None = None,
        network: LinkModel | str | Path | None = None,
        trace: str | Path | None = None,
        *,
        arrival_timeout: float | None = None,
        threads: int = 1,
        checksums: bool = False,
        on_failure: Literal["raise", "regroup"] = "raise",  # deaths of ranks
        spares: int = 0,
        copy_residuals_every: int | None = None,
        link: EmulatedLink | str | None = None,  # trials on one machine
        ranks_per_node: int | None = None,
        alone: bool = False,  # the process's own job, and its end
        abort_hook: bool = True,
    ) -> None:
        super().__init__(
            arguments.validate_arguments(
                mpi_comm, topology, timeout, arrival_timeout, piece_bytes, threads, alone, abort_hook, link,
                ranks_per_node, on_failure, checksums, spares, trace, copy_residuals_every, verify, network,
            )
        )  # fmt: skip

    def __dir__(self) -> list[str]:
        """Return the names that programs use, for completion. The others are for methods, executors and tests."""
        return [*_NAMES]

    def __repr__(self) -> str:
        link = "" if self.link is None else f", emulated link of {self.link}"
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}{link}>"

    @property
    def trace(self) -> Trace | None:
        """The trace that ``Communicator(trace=...)`` records, for spans of your own; None without one."""
        return cast("Trace | None", self.observer)

    @property
    def local_rank(self) -> int:
        """Number of this rank among the ranks of its host."""
        return self.hosts.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks of this rank's host."""
        return self.hosts.sizes[self.hosts.node]

    def select(self, payload_bytes: int) -> Topology:
        """Return the topology for a payload of `payload_bytes`.

        Examples
        --------
        >>> import mpicomp
        >>> mpicomp.run_local(4, lambda comm: comm.select(100_000_000).name, topology="torus")[0]
        'torus'
        """
        return self.routes.select(payload_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.ending.leave_block(error)
            stopping.STOP.release(self)

    def close(self) -> None:
        """Free the MPI communicator (collective). After an error it is left to MPI's own clean-up instead.

        Raises
        ------
        CollectiveMismatch
            Other ranks make another call. The communicator stays open.
        RuntimeError
            A call was let go without waiting for it.
        OSError
            The trace cannot be written.

        Examples
        --------
        A block of ``with`` closes it, too:

        >>> import mpicomp
        >>> comm = mpicomp.Communicator()
        >>> comm.close()
        >>> with mpicomp.Communicator() as comm:
        ...     comm.barrier()
        """
        try:
            super().close()
        finally:
            if not self.calls.is_open:
                stopping.STOP.release(self)

    def start_progress_thread(self) -> bool:
        """Let a thread of this process drive all calls from now on, while the caller computes. Not collective.

        All communicators of a process share one such thread. Any thread may then make calls; the ranks must still make
        them in one order. A blocking call takes some 50 us longer, for the way to the thread and back.

        Returns
        -------
        bool
            False: MPI was started without MPI_THREAD_MULTIPLE, or the ranks are threads; nothing has changed.

        Raises
        ------
        RuntimeError
            A call is in flight.
        CommunicatorClosed

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> with mpicomp.Communicator() as comm:
        ...     if not comm.start_progress_thread():
        ...         print("calls advance in poll and wait only")
        ...     handle = comm.iallreduce(np.ones(3))
        ...     total = handle.wait()  # computing in between takes no time from it
        """
        return self.calls.start_progress_thread(self.observer)

    @property
    def calls_in_flight(self) -> int:
        """Number of calls that have begun and not ended."""
        return len(self.calls.ordered)

    @property
    def failure(self) -> BaseException | None:
        """The error for which the communicator was given up."""
        return self.calls.failure

    @property
    def lacks_thread_support(self) -> bool:
        """True if MPI was started in such a way that no progress thread can make calls."""
        return self.calls.lacks_thread_support

    if not TYPE_CHECKING:  # which would take every name for one of ours

        def __getattr__(self, name: str) -> NoReturn:
            raise marked(AttributeError(other_names.explain(name, _NAMES), name=name, obj=self))

    # Dense sums ------------------------------------------------------------------------------------------------------

    @overload
    def allreduce(self, x: Kept, op: Op = "sum", out: Kept | None = None) -> Kept: ...
    @overload
    def allreduce(self, x: Number, op: Literal["mean"], out: None = None) -> float: ...
    @overload
    def allreduce(self, x: bool | np.bool, op: Literal["min", "max"], out: None = None) -> bool: ...
    @overload
    def allreduce(self, x: int | np.integer[Any] | np.bool, op: NotMean = "sum", out: None = None) -> int: ...
    @overload
    def allreduce(self, x: float | np.floating[Any], op: NotMean = "sum", out: None = None) -> float: ...
    @keep_uncompiled
    def allreduce(self, x: Array, op: Op = "sum", out: Array = None) -> Array:
        """Sum, mean, minimum or maximum over ranks of equally shaped arrays, or of numbers; equal on every rank.

        Parameters
        ----------
        x : ndarray, tensor, anything with DLPack, or a number
            float16, bfloat16, float32, float64; but for means int32 and int64 too. Contiguous. Left alone unless it is
            `out`. Of numbers bool, int and float, also NumPy's; of one type on all ranks.
        op : "sum", "mean", "min" or "max"
            Minimum and maximum are NaN where a rank has NaN. ``MPI.SUM``, ``MPI.MIN`` and ``MPI.MAX`` are taken too.
        out : like x, optional
            Overwritten with the result. None for numbers.

        Returns
        -------
        like x, or a number of Python's
            A mean is a float. A sum of bools is the int of how many are true, their minimum whether all are.

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        TypeError, ValueError
            This rank's array or number cannot be reduced; the others then raise CollectiveMismatch.

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> def reduce(comm):
        ...     gradient = np.array([1.0, 2.0]) * comm.rank
        ...     comm.allreduce(gradient, "mean", out=gradient)
        ...     return gradient, comm.allreduce(comm.rank, "max"), comm.allreduce(comm.rank > 0)
        >>> mpicomp.run_local(4, reduce)[0]
        (array([1.5, 3. ]), 3, 3)
        """
        name = validate_operation(self, op)
        if isinstance(x, NUMBERS):
            return exchanges.allreduce_number(self, x, name, out, self.traffic)
        source, target, result = validate_sum(self, x, name, out)
        mark, describe = self.routes.all_reduce(source, name, "allreduce")
        call = Call(self, describe, self.traffic.clock)
        steps = self._sum_steps(call, source, target, name, mark, self.traffic)
        if self.observer is None:
            self.run(call, steps)
        else:
            with self.observe("allreduce", op=name, bytes=source.values.nbytes):
                self.run(call, steps)
        self.traffic.calls += 1
        return result

    @keep_uncompiled
    def iallreduce(self, x: Kept, op: Op = "sum", out: Kept | None = None) -> Handle[Kept]:
        """Like `allreduce` of an array, but returns at once. Do not touch `x` and `out` until the handle is done.

        Parameters
        ----------
        x, op, out
            As in `allreduce`; `x` is no number.

        Returns
        -------
        Handle
            Its ``wait()`` returns the result of `allreduce`, to the bit, and raises its errors.

        Raises
        ------
        TypeError, ValueError
            This rank's array cannot be reduced; the others then raise CollectiveMismatch.
        CommunicatorClosed

        Examples
        --------
        >>> import numpy as np
        >>> import mpicomp
        >>> def reduce_two(comm):
        ...     handles = [comm.iallreduce(np.full(2, number)) for number in (1.0, 2.0)]
        ...     return [handle.wait() for handle in handles]
        >>> mpicomp.run_local(4, reduce_two)[0]
        [array([4., 4.]), array([8., 8.])]
        """
        name = validate_operation(self, op)
        source, target, result = validate_sum(self, x, name, out)
        mark, describe = self.routes.all_reduce(source, name, "iallreduce")
        call = Call(self, describe)
        call.result = result
        steps = self._sum_steps(call, source, target, name, mark, Traffic(), background=True)
        with self.observe("iallreduce", op=name, bytes=source.values.nbytes):
            return self.begin(call, steps)

    def _sum_steps(
        self, call: Call, source: Flat, target: Flat, op: str, mark: int, traffic: Traffic, background: bool = False
    ) -> Steps:
        """Return the steps of a sum, which can be made again from a copy where the result replaces the array."""

        def steps() -> Steps:
            call.is_compared = dense.is_small(self, source.values, source.dtype)
            return self.sum_arrays(call, source, target, op, traffic, mark, background=background)

        if self.recovery is not None:
            call.remake = from_copy(source, target, steps)
        return steps()

    dense_steps, sum_arrays = dense.dense_steps, dense.sum_arrays

    # Exchanges and messages: functions that take the communicator -----------------------------------------------------

    broadcast, allgather, barrier = exchanges.broadcast, exchanges.allgather, exchanges.barrier
    broadcast_object, allgather_object = objects.broadcast_object, objects.allgather_object
    stop_requested = stopping.stop_requested
    admit = admit
    send, recv, isend, irecv = point_to_point.send, point_to_point.recv, point_to_point.isend, point_to_point.irecv

    # Parts of the ranks ----------------------------------------------------------------------------------------------

    @overload
    def split(self, color: int, key: int = 0, topology: TopologyName | Topology | None = None) -> Communicator: ...
    @overload
    def split(self, color: None, key: int = 0, topology: TopologyName | Topology | None = None) -> None: ...
    @overload
    def split(
        self, color: int | None, key: int = 0, topology: TopologyName | Topology | None = None
    ) -> Communicator | None: ...
    @keep_uncompiled
    def split(
        self, color: int | None, key: int = 0, topology: TopologyName | Topology | None = None
    ) -> Communicator | None:
        """Return a communicator of the ranks that give the same colour; collective.

        It has this one's timeouts, `verify`, `piece_bytes`, `threads` and `checksums`, but neither its network, which
        other groups may load at the same time, nor its trace. Close it yourself: closing this one does not.

        Parameters
        ----------
        color : int from 0 to 2^31 - 1, or None
            None: this rank takes part in the call, and in no group.
        key : int of 32 bits
            Ranks are numbered by it, and where it is equal, in the order that they have here.
        topology : str or Topology, optional
            Of the group; None: this communicator's.

        Returns
        -------
        Communicator, or None where `color` is None

        Raises
        ------
        TopologyError
            The topology does not fit the number of ranks of the group; on all of these.
        TypeError, ValueError
            This rank's colour or key is not valid; the others then raise CollectiveMismatch.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        RanksLost
            A rank has died meanwhile; on all survivors, which can make the call again.

        Examples
        --------
        >>> import mpicomp
        >>> def sum_of_parity(comm):
        ...     with comm.split(color=comm.rank % 2) as part:
        ...         return part.allreduce(comm.rank)
        >>> mpicomp.run_local(4, sum_of_parity)
        [2, 4, 2, 4]
        """
        size, part = self.size, splitting.split(self, color, key)
        chosen = self.topology if topology is None else topology
        return make_on_all(self, size, lambda: self._of_part(part, color, chosen), splitting.abandon)

    def _of_part(
        self, part: MPI.Comm | None, color: int | None, chosen: TopologyName | Topology
    ) -> Communicator | None:
        if part is None:
            return None
        try:
            with self.exchange():  # ranks of this one may not come to the part, or wait for this rank elsewhere
                made = Communicator(
                    part,
                    chosen,
                    self.timeout,
                    self.verifies,
                    self.options.piece_bytes,
                    arrival_timeout=self.arrival_timeout,
                    threads=self.options.threads,
                    abort_hook=False,  # this one has installed it, or must not
                    ranks_per_node=None if self.options.ranks_per_node is None else NodeLabel(self.layout.node),
                    checksums=self.options.checksums,
                )
        except TopologyError as error:
            part.Free()
            raise TopologyError(f"{self.here}, split(color={color}): {error}; pass another topology to it") from error
        part.Free()
        if self.recovery is None:
            made.ending.join(self.ending)
        else:  # the loss of other ranks ends no call of the group
            made.losses.end_calls = False
        return made

    grid = splitting.grid

    @property
    @keep_uncompiled
    def nodes(self) -> Nodes:
        """Communicators of the ranks of this node, and of one rank of each node; collective where first read.

        They are closed with this communicator.

        Raises
        ------
        TopologyError
            This communicator's topology does not fit the number of nodes.
        CollectiveMismatch, CollectiveTimeout, PeerFailure

        Examples
        --------
        >>> import mpicomp
        >>> def number(comm):
        ...     nodes = comm.nodes
        ...     return nodes.node, nodes.local.rank, nodes.across.size
        >>> mpicomp.run_local(4, number, ranks_per_node=2)
        [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
        """
        return repeat_after_deaths(lambda: self.nodes_of(self.layout))

    def nodes_of(self, layout: NodeLayout) -> Nodes:
        """Like `nodes`, for any layout of this communicator's ranks; collective where first called for it."""
        nodes: Nodes | None = self.levels.get(layout)
        if nodes is None:
            epoch = self.calls.epoch
            nodes = open_nodes(self, layout)
            if self.calls.epoch == epoch:  # else they are of ranks that have become others at the end of the last call
                self.levels[layout] = nodes
        for part in (nodes.local, nodes.across):  # calls of both levels begin on this communicator, which frees its own
            part.users.free_unused()
        return nodes
