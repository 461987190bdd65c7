"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeVar, overload

import numpy as np
from mpi4py import MPI

from collectives.annotations import AnyArray, Array, Bytes, Kept
from collectives.arrays.elements import Combine, add
from collectives.arrays.vectors import Flat
from collectives.communicator import arguments, exchanges, other_names, point_to_point, splitting, stopping
from collectives.communicator.calls import Calls, Users, await_request, trace_check
from collectives.communicator.checked_messages import CheckedComm
from collectives.communicator.ending import Ending, close, end_closed
from collectives.communicator.exchanges import NUMBERS, validate_operation, validate_sum
from collectives.communicator.nodes import NodeLabel, NodeLayout, Nodes, members_of, open_nodes
from collectives.communicator.routes import VERSION, Routes
from collectives.communicator.slow_link import link_of, slow_down
from collectives.consistency.call_check import CallCheck, most_bytes
from collectives.consistency.descriptions import fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.cost.link import LinkModel
from collectives.cost.rate import EmulatedLink
from collectives.dense import allreduce as dense
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    DamagedMessage,
    PeerFailure,
    marked,
    reword,
)
from collectives.execution.handle import Call, Handle, Steps, keep_uncompiled
from collectives.execution.pipelined import Cache
from collectives.execution.program import Program
from collectives.execution.traffic import Traffic
from collectives.process_end import (
    end_with_process,
    expect_deaths,
    fail_at_end,
    forget_endings,
    leave_without_finalizing,
    meet_at_end,
    say_farewell,
)
from collectives.progress.polling import giving_up_by, keep_alive, wait
from collectives.recovery import newcomers
from collectives.recovery.answers import watch
from collectives.recovery.fault_tolerance import (
    ADVICE,
    describe_failed,
    is_tolerant,
    is_tolerant_job,
    repeat_after_deaths,
    reporting_deaths,
    revoke,
)
from collectives.recovery.half_made import guard_half_made
from collectives.recovery.newcomers import Newcomers
from collectives.recovery.regroup import Regroup
from collectives.recovery.witness import call_witness
from collectives.schedules.plan import Topology, TopologyError
from collectives.schedules.registry import TopologyName
from collectives.trace.flight_recorder import RecordedGroup, recorder_here
from collectives.trace.recorder import Trace

SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_limit`

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
"""Names that programs use, which docs/communicator.md describes."""


class _Listed(type):
    """Class that lists the names that programs use: Python's prompt completes with those of object and class."""

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name in _NAMES or name.startswith("__")]


class Communicator(metaclass=_Listed):
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
        Folder for a file per rank with the phases of each call; see docs/traces.md. On all ranks or
        on none.
    arrival_timeout : float, optional
        Seconds that a rank may come later to a call than the others, which warn of it from 15 s on. None: the
        environment's ``MPICOMP_ARRIVAL_TIMEOUT``, else 1800, or `timeout` if that is longer. It holds for making the
        communicator too, and without `verify` for a whole call.
    threads : int
        So many threads encode, merge and decode pieces while the calling one polls; 1: that one does it all. Results
        are the same with any number, and ranks may have different ones. Worth it for methods that compute long
        (quantizers, entropy coding, top-k) on a rank that has several cores to itself; dense sums go on without.
    link : EmulatedLink or str, optional
        Emulate slow links: messages are held back until a link of this rate, in each direction of each rank, would have
        delivered them. With `ranks_per_node` a node has one such link, and messages within a node are not held back. A
        text such as "100mbit" or "1gbit,50us", which adds a latency. Equal on all ranks; groups by `split` have the
        same link. Results are the same. For trying a method on one machine, see docs/local.md.
    alone : bool
        Let COMM_WORLD be all there is, even where a launcher started more processes than MPI has joined; so does
        ``MPICOMP_ALONE=1``. In a process that a rank has started, MPI then makes a job of this process alone.
    abort_hook : bool
        Call `install_abort_hook`, if there are several ranks and these are all of the job; not in an interactive
        session, nor under pytest.
    ranks_per_node : int, optional
        Let groups of so many neighbouring ranks of a host count as a node, such as those of a socket, or to try
        `PerNode` on one machine. None: the ranks of a host are a node, and over an emulated link each rank is one.
        Equal on all ranks.
    on_failure : "raise" or "regroup"
        After the death of a rank: raise `PeerFailure` on all others, or go on with them. They then have new ranks, and
        calls in flight are made again; see docs/faults.md. The launcher must let ranks outlive others. Equal on all
        ranks.
    spares : int
        The last so many ranks wait, in `admit`, and take the places of ranks that die; with ``on_failure="regroup"``.
        Until then each has a communicator of its own. Equal on all ranks.
    checksums : bool
        Compare a checksum of each message before its bytes are used, and raise `DamagedMessage` on all ranks if it
        differs; see docs/tuning.md#checksums. Equal on all ranks.
    copy_residuals_every : int, optional
        Steps after which each rank sends a copy of its residual to another rank, so that the survivors of its death can
        add it to theirs; with on_failure="regroup". None: no copies. Equal on all ranks. See docs/faults.md.

    Attributes
    ----------
    rank, size : int
    local_rank, local_size : int
        The same among the ranks of this rank's host.
    here : str
        ``"rank 3 of 8"``, for messages.
    mpi_comm : MPI.Comm
        The duplicate.
    link : EmulatedLink or None
        The link that messages are held back by.
    one_node : bool
        All ranks are on one node; False over an emulated link.
    layout, hosts : NodeLayout
        Node and host of each rank.
    swapped_bytes : int
        Longest vector that can be summed in the messages of a call's check.
    calls : Calls
        Calls in flight, and their order.
    ending : Ending
        End of the communicator after a call that failed.
    missing : MissingRanks
        Messages about ranks that do not come.
    traffic : Traffic
        Cost of all calls of `allreduce` so far.
    dense_buffers : list of uint8 arrays
        Receive buffers of dense sums, from one call to the next.
    trace : Trace or None
    workers : Workers or None
        Threads that share the work on pieces.
    threads : int
        Number of threads that work on pieces.
    verifies : bool
        The ranks compare each collective before they make it.
    checks_messages : bool
        Messages have checksums.
    route, route_parts : str, tuple of str
        The routes of messages in words, as a whole and one property each: ranks must agree on them.

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
        link: EmulatedLink | str | None = None,
        arrival_timeout: float | None = None,
        threads: int = 1,
        alone: bool = False,
        abort_hook: bool = True,
        ranks_per_node: int | None = None,
        on_failure: Literal["raise", "regroup"] = "raise",
        checksums: bool = False,
        spares: int = 0,
        copy_residuals_every: int | None = None,
    ) -> None:
        given = arguments.validate_arguments(
            mpi_comm, topology, timeout, arrival_timeout, piece_bytes, threads, alone, abort_hook, link, ranks_per_node,
            on_failure, checksums, spares, trace, copy_residuals_every,
        )  # fmt: skip
        self.topology, self.workers = given.topology, given.workers
        self.timeout, self.arrival_timeout = given.timeout, given.arrival_timeout
        self.ranks_per_node, self.checksums = given.ranks_per_node, given.checksums
        self.copy_residuals_every = given.copy_residuals_every
        if is_tolerant_job():
            guard_half_made()
        with reporting_deaths(given.parent, "while the ranks made a communicator"):
            duplicated = arguments.duplicate(given, spares, on_failure == "regroup")
            mpi_comm, layout, hosts, self._key, damage = duplicated
            pool, layouts = mpi_comm, (layout, hosts)
            numbers: Sequence[int] = range(pool.size - spares)
            if spares:
                members = numbers
                numbers = members if pool.rank in members else (pool.rank,)
                mpi_comm = pool.Split(0 if pool.rank in members else pool.rank, pool.rank)
                mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
                layout, hosts = (one.of_survivors(numbers, mpi_comm.rank) for one in layouts)
        if given.link is not None:
            mpi_comm = slow_down(mpi_comm, given.link, layout.node_of)
        self.link = link_of(mpi_comm)
        self._nodes: dict[NodeLayout, Nodes] = {}
        # Steps may be made again after a death, from the state of before; parts of this communicator inherit it.
        self.repeats_calls = on_failure == "regroup" and pool.size > 1
        self.threads = 1 if self.workers is None else self.workers.threads
        self.trace: Trace | None = None
        self.verifies = verify
        self._users = Users()
        self.calls = Calls(self._users)
        self.piece_bytes = piece_bytes
        self.newcomers = Newcomers(self, pool, layouts, pool.size - spares) if spares else None
        self.regroup: Regroup | None = None
        self._open(mpi_comm, layout, hosts)
        if self.repeats_calls:
            self.regroup = Regroup(self, leave_without_finalizing, fail_at_end, numbers)
            expect_deaths()
        self.calls.regroup = self.regroup
        self._fails_with_others = self.regroup is None and is_tolerant(self.missing.comm)
        if pool.size == MPI.COMM_WORLD.size and (is_tolerant(pool) or pool.size > 1):
            if is_tolerant(pool):
                meet_at_end(self.newcomers)
            with reporting_deaths(pool, "while the ranks made a communicator"), self.exchange(pool):
                call_witness(self.checked(pool), self.arrival_timeout)
        with reporting_deaths(self.missing.comm, "while the ranks made a communicator"), self.exchange():
            if damage:
                raise DamagedMessage(damage)
            try:
                self.network = arguments.agree_on_network(self.mpi_comm, network, self.timeout)
            except ValueError:
                self.close()
                raise
            self._eager_bytes = (
                SHARED_PIECE_BYTES if self.one_node else arguments.eager_piece_bytes(self.mpi_comm, self.timeout)
            )
        self._set_routes()
        self.traffic = Traffic()
        if trace is not None:
            with self.exchange():
                self.trace = arguments.open_trace(self.mpi_comm, trace, self.timeout, self.close)
            self.trace.link = "" if self.link is None else str(self.link)
            self.ending.trace = self.trace
        if self.regroup is not None:
            watch(self.regroup)

    def _open(self, mpi_comm: MPI.Comm, layout: NodeLayout, hosts: NodeLayout) -> None:
        """Make all that depends on the group of ranks, except for the routes of messages."""
        self.checks_messages = self.checksums and mpi_comm.size > 1
        self.mpi_comm: Any = self.checked(mpi_comm)
        self.layout, self.hosts = layout, hosts
        self.rank, self.size, self.here = layout.rank, mpi_comm.size, f"rank {layout.rank} of {mpi_comm.size}"
        self.local_rank, self.local_size = hosts.local_rank, hosts.sizes[hosts.node]
        self.one_node = len(layout.sizes) == 1 and self.link is None
        self.swapped_bytes = most_bytes(self.size, self.one_node)
        self.missing = MissingRanks(mpi_comm, self.timeout)
        self._call_check = CallCheck(self.mpi_comm, self.missing, self.swapped_bytes, self.checks_messages)
        self.dense_buffers: list[Bytes] = []
        members = members_of(mpi_comm)
        flight = RecordedGroup(recorder_here(), self._key_of_group(), self.rank, members, self.calls)
        self.calls.renew(mpi_comm, self.here, flight)
        self.ending = Ending(
            self.calls, self.missing, self.size, self.workers, self.newcomers, self._call_check, self.dense_buffers
        )
        self.ending.trace = self.trace
        end_with_process(self.ending)

    def checked(self, mpi_comm: MPI.Comm) -> Any:
        """Return a communicator of MPI whose messages have checksums, if those of this communicator have them."""
        return CheckedComm(mpi_comm) if self.checksums and mpi_comm.size > 1 else mpi_comm

    @contextmanager
    def exchange(self, *others: MPI.Comm) -> Iterator[None]:
        """Exchange messages in this block that are no calls: damage ends the communicator, on the other ranks too.

        `others` are communicators with ranks that this one lacks, which their requests fail on.
        """
        try:
            with giving_up_by(self.given_up):
                yield
        except CollectiveError as error:
            if not isinstance(error, DamagedMessage) and not self.missing.damage_elsewhere():
                raise
            ended = self.ending.abort(error)
            for other in others[: self.newcomers is not None]:
                revoke(other)
            raise ended from error.__cause__

    def _key_of_group(self) -> str:
        """Return the name of the group of ranks in the flight recorder: equal on all, also if survivors try twice."""
        regroup = self.regroup
        return self._key if regroup is None else f"{self._key}+{regroup.count + 1}"

    def _set_routes(self) -> None:
        self._routes = Routes(
            self.rank, self.size, self.topology, self.network, self.piece_bytes, self._eager_bytes, self.link
        )
        self.route, self.route_parts = str(self._routes), self._routes.parts

    def renew(self, mpi_comm: MPI.Comm, survivors: Sequence[int], layouts: Sequence[NodeLayout]) -> None:
        """Go on with the ranks that had these numbers in the layouts of nodes and hosts; `mpi_comm` is theirs.

        Raises
        ------
        TopologyError
            The topology does not fit their number.
        """
        ended = [self.ending, *(part.ending for part in self.parts)]
        # MPI may still write there
        keep_alive(self.ending, self._call_check, self.dense_buffers, *self._nodes.values())
        self._nodes.clear()
        self._users.renew()
        self._open(mpi_comm, *(one.of_survivors(survivors, mpi_comm.rank) for one in layouts))
        forget_endings(ended)  # behind `_open`: the handler at the program's end keeps its place while one is left
        if not isinstance(self.topology, str):
            self.topology.plan(self.rank, self.size)
        self._set_routes()

    def shared_counters(self) -> dict[str, Any]:
        """Return names and numbers that are equal on all ranks, which a newcomer takes over by `adopt`."""
        return {"key": self._key, "eager": self._eager_bytes, "tag": self.last_tag, "version": VERSION}

    def adopt(self, shared: dict[str, Any]) -> None:
        """Take over the names and numbers of a member.

        Raises
        ------
        ValueError
            The member has another version of the wire format.
        """
        if shared["version"] != VERSION:
            raise ValueError(f"wire format {VERSION} here, and {shared['version']} on the members")
        self._key, self._eager_bytes = shared["key"], shared["eager"]

    @property
    def members(self) -> tuple[int, ...]:
        """Rank that each rank had when the communicator was made; other numbers only after ranks have died."""
        return tuple(range(self.size)) if self.regroup is None else self.regroup.members

    @property
    def parts(self) -> tuple[Communicator, ...]:
        """Communicators of `nodes`, which this one has made."""
        return tuple(part for nodes in self._nodes.values() for part in (nodes.local, nodes.across))

    def __dir__(self) -> list[str]:
        """Return the names that programs use, for completion. The others are for methods, executors and tests."""
        return [*_NAMES]

    def __repr__(self) -> str:
        link = "" if self.link is None else f", emulated link of {self.link}"
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}{link}>"

    @property
    def calls_in_flight(self) -> int:
        """Number of calls that have begun and not ended."""
        return len(self.calls.ordered)

    @property
    def failure(self) -> BaseException | None:
        """The error for which the communicator was given up."""
        return self.calls.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.ending.leave_block(error)
            stopping.STOP.release(self)

    def __del__(self) -> None:
        # MPI goes on writing to the buffers of a call under way, though no caller waits for it any more.
        calls = getattr(self, "calls", None)
        if calls is not None and calls.ordered:
            keep_alive(self)

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

        def leave() -> None:
            if self.regroup is not None:
                say_farewell(self.regroup)
            elif not self.ending.keeps_requests:
                self.mpi_comm.Free()

        try:
            close(self, lambda: self._call_check if self.verifies else None, leave)
        finally:
            if self.calls.broken:
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
        return self.calls.start_progress_thread(self.trace)

    @property
    def lacks_thread_support(self) -> bool:
        """True if MPI was started in such a way that no progress thread can make calls."""
        return self.calls.lacks_thread_support

    # Operations of your own ------------------------------------------------------------------------------------------

    def run(self, call: Call, steps: Steps) -> Any:
        """Make a call and wait for its result.

        Raises
        ------
        CommunicatorClosed
        RuntimeError
            Another thread is in a call of this communicator, or this one within a call, in a signal handler.
        """
        driver = self.calls.driver
        if driver is not None:
            driver.reject_waiting(call.name)
            return self.begin(call, steps).wait()
        if self.calls.ordered:
            call.reject_nesting()
        self.calls.open(call, steps)
        return call.wait()

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background; raises as `run` does."""
        return self.calls.begin(call, steps)

    def advance(self) -> None:
        """Advance every call in flight of this thread, without waiting; no-op if a progress thread does so."""
        self.calls.advance()

    def check(
        self,
        call: Call,
        mark: int,
        traffic: Traffic | None = None,
        values: AnyArray | None = None,
        sums: AnyArray | None = None,
        meanwhile: Callable[[], None] | None = None,
        combine: Combine = add,
    ) -> Steps:
        """Raise on every rank unless all make this call; a small vector may be summed in the same messages.

        See `CallCheck.steps`. It must be the first step of a call, since checks are numbered in that order, or follow
        `enter`.
        """
        if not self.verifies and values is None:
            call.arrival = 0  # until it ends, as nothing distinguishes a rank that is late from one that is silent
            return iter(())
        trace = self.trace
        if trace is not None and meanwhile is not None:
            meanwhile = trace.around("prepare", meanwhile)
        steps = self._call_check.steps(call, mark, traffic, values, sums, meanwhile, combine)
        return steps if trace is None else trace_check(call, trace, steps, values)

    def enter(self, call: Call) -> None:
        """Give a call its number now, before the ranks begin to compare it."""
        if (self.verifies or call.is_compared) and not call.is_pairwise:
            self._call_check.enter(call)

    def sum_small(self, call: Call, values: AnyArray, sums: AnyArray, traffic: Traffic) -> Steps:
        """Sum a vector of up to `swapped_bytes` within a call on which the ranks have agreed."""
        yield from self.turn_of(call)
        yield from self._call_check.sum(call, values, sums, traffic)

    def turn_of(self, call: Call) -> Steps:
        """Wait until all calls that were begun before have ended.

        Calls that use MPI's own collectives must start them in one order on all ranks, in whichever order calls are
        driven.
        """
        return call.turn()

    await_request = staticmethod(await_request)

    def wait(self, request: MPI.Request, describe: Callable[[], str]) -> None:
        """Poll a request of this communicator up to the timeout; it is no call, so other ranks need not wait too."""
        try:
            wait(request, self.timeout, describe, self.given_up)
        except BaseException as error:
            raise self.ending.abort(error, request) from error

    def agree(self, mark: int, describe: Callable[[], str]) -> None:
        """Raise on every rank unless all make this call, which does nothing else."""
        call = Call(self, describe)
        call.remake = lambda: self.check(call, mark)
        self.run(call, call.remake())

    def reject(self, error: Exception, call: str) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that made the call.

        Ranks that reject for the same reason at the same time agree, and each raises its own error.
        """
        reason = f"rejects {call}: {error}"
        with suppress(CollectiveMismatch, CollectiveTimeout):  # this rank's own error is more precise
            self.agree(fingerprint(reason.replace(self.here, "")), lambda: f"rank {self.rank} {reason}")
        raise marked(error) from None

    @contextmanager
    def refusing(self, call: str, *kinds: type[Exception], where: str = "") -> Iterator[None]:
        """Reject the call by this rank's errors of these kinds in the block, whose text then begins with rank and call.

        where : another beginning of the text
        """
        try:
            yield
        except kinds as error:
            self.reject(reword(error, f"{where or f'{self.here}, {call}'}: {error}"), call)

    def given_up(self) -> bool:
        """Return whether another rank has given the communicator up."""
        if self._fails_with_others and (dead := describe_failed(self.mpi_comm)):
            raise PeerFailure(f"{self.here}: {dead} died{ADVICE}")
        return self.missing.another_gave_up()

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""
        self.ending.give_up(error)

    def span(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Record a call, if there is a trace."""
        return nullcontext() if self.trace is None else self.trace.span("call", name, **details)

    if not TYPE_CHECKING:  # which would take every name for one of ours

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(other_names.explain(name, _NAMES), name=name, obj=self)

    # Choosing and preparing ------------------------------------------------------------------------------------------

    def select(self, payload_bytes: int) -> Topology:
        """Return the topology for a payload of `payload_bytes`.

        Examples
        --------
        >>> import mpicomp
        >>> mpicomp.run_local(4, lambda comm: comm.select(100_000_000).name, topology="torus")[0]
        'torus'
        """
        return self._routes.select(payload_bytes)

    def gathers(self, payload_bytes: int) -> bool:
        """Return True if packed payloads of this size are fastest by one all-gather that every rank merges."""
        return self._routes.gathers(payload_bytes)

    def packed_piece_bytes(self) -> int:
        """Return the longest message of packed payloads, which suits the transport."""
        return self._routes.packed_piece_bytes()

    def program(self, topology: Topology, n: int, alignment: int, piece_elements: int) -> Program:
        """Return the program of this rank's part of an all-reduce of `n` elements, compiled once."""
        return self._routes.program(topology, n, alignment, piece_elements)

    @property
    def last_tag(self) -> int:
        """The last tag of a long-lived user; 0 before the first."""
        return self._users.last_tag

    def tags_from(self, tag: int) -> AbstractContextManager[None]:
        """Give out the tags behind this one once more in this block, to the user that had them."""
        return self._users.tags_from(tag)

    def fixed_tag(self) -> int:
        """Return a tag for one long-lived user of this communicator; all ranks take theirs in the same order."""
        return self._users.fixed_tag()

    def next_tag(self) -> int:
        """Return a tag for one call; all ranks take theirs in the same order."""
        return self.calls.next_tag()

    def tags_unused(self, unless_made: bool = False) -> AbstractContextManager[None]:
        """Take back the tags of long-lived users that are made in this block; `unless_made`: only if it fails."""
        return self._tags_unused_of_all(unless_made) if self._nodes else self._users.tags_unused(unless_made)

    @contextmanager
    def _tags_unused_of_all(self, unless_made: bool) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._users.tags_unused(unless_made))
            for part in self.parts:
                stack.enter_context(part.tags_unused(unless_made))
            yield

    def common(self, kind: type[_Kind]) -> _Kind:
        """Return the object of this class that all long-lived users of this communicator share on this rank."""
        return self._users.common(kind)

    def persistent(self, owner: object) -> Cache:
        """Return a cache for a long-lived user's persistent requests, of one program on the same buffers.

        Requests and their buffers stay until the next call after `owner`, which is referred to weakly, is gone.
        """
        return self._users.persistent(owner)

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
        mark, describe = self._routes.all_reduce(source, name, "allreduce")
        call = Call(self, describe, self.traffic.clock)
        steps = self._sum_steps(call, source, target, name, mark, self.traffic)
        if self.trace is None:
            self.run(call, steps)
        else:
            with self.span("allreduce", op=name, bytes=source.values.nbytes):
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
        mark, describe = self._routes.all_reduce(source, name, "iallreduce")
        call = Call(self, describe)
        call.result = result
        steps = self._sum_steps(call, source, target, name, mark, Traffic(), background=True)
        with self.span("iallreduce", op=name, bytes=source.values.nbytes):
            return self.begin(call, steps)

    def _sum_steps(
        self, call: Call, source: Flat, target: Flat, op: str, mark: int, traffic: Traffic, background: bool = False
    ) -> Steps:
        """Return the steps of a sum, which can be made again from a copy where the result replaces the array."""

        def steps() -> Steps:
            call.is_compared = dense.is_small(self, source.values, source.dtype)
            return dense.sum_arrays(self, call, source, target, op, traffic, mark, background=background)

        if self.regroup is not None:
            call.remake = self.regroup.from_copy(source, target, steps)
        return steps()

    dense_steps, mean_of_arrays = dense.dense_steps, dense.mean_of_arrays

    # Exchanges and messages: functions that take the communicator -----------------------------------------------------

    broadcast, allgather, barrier = exchanges.broadcast, exchanges.allgather, exchanges.barrier
    broadcast_object, allgather_object = exchanges.broadcast_object, exchanges.allgather_object
    stop_requested = stopping.stop_requested
    admit = newcomers.admit
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

        Examples
        --------
        >>> import mpicomp
        >>> def sum_of_parity(comm):
        ...     with comm.split(color=comm.rank % 2) as part:
        ...         return part.allreduce(comm.rank)
        >>> mpicomp.run_local(4, sum_of_parity)
        [2, 4, 2, 4]
        """
        part = splitting.split(self, color, key)
        if part is None:
            return None
        chosen = self.topology if topology is None else topology
        try:
            with self.exchange():  # ranks of this one may not come to the part, or wait for this rank elsewhere
                made = Communicator(
                    part,
                    chosen,
                    self.timeout,
                    self.verifies,
                    self.piece_bytes,
                    arrival_timeout=self.arrival_timeout,
                    threads=self.threads,
                    abort_hook=False,  # this one has installed it, or must not
                    ranks_per_node=None if self.ranks_per_node is None else NodeLabel(self.layout.node),
                    checksums=self.checksums,
                )
        except TopologyError as error:
            part.Free()
            raise TopologyError(f"{self.here}, split(color={color}): {error}; pass another topology to it") from error
        part.Free()
        if self.regroup is None:  # else the groups are those of the survivors
            made.ending.join(self.ending)
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
        if layout not in self._nodes:
            self._nodes[layout] = open_nodes(self, layout)
        nodes = self._nodes[layout]
        for part in (nodes.local, nodes.across):  # calls of both levels begin on this communicator, which frees its own
            part._users.free_unused()
        return nodes

    @property
    def layouts_of_nodes(self) -> tuple[NodeLayout, ...]:
        """The layouts for which `nodes_of` has made communicators."""
        return tuple(self._nodes)

    def close_parts(self) -> None:
        """Close the communicators of `nodes` with this one, and dismiss the ranks that wait."""
        if self.newcomers is not None:
            self.newcomers.dismiss()
        if self.regroup is None:
            for nodes in self._nodes.values():
                nodes.close()
        else:  # the ranks have agreed for all parts, and one may have died since
            for part in self.parts:
                end_closed(part)

    def free_requests(self) -> None:
        """Free the requests and memory of a communicator that is closed."""
        self.dense_buffers.clear()
        self._users.free_all()
        self._call_check.free()
