"""A group of ranks: its messages, routes and tags, and its calls in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes
from collectives.arrays.elements import Combine, add
from collectives.checksums.checked_messages import with_checksums
from collectives.consistency.call_check import CallCheck, most_bytes
from collectives.consistency.descriptions import fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.emulation.slow_link import link_of, slow_down
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    DamagedMessage,
    PeerFailure,
    marked,
    reword,
)
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.observer import Observer
from collectives.execution.pipelined import Cache
from collectives.execution.program import Program
from collectives.execution.traffic import Traffic
from collectives.group import opening
from collectives.group.calls import Calls, Users, await_request
from collectives.group.ending import Ending, close, end_closed
from collectives.group.opening import Options
from collectives.group.routes import VERSION, Routes
from collectives.listed_names import Listed
from collectives.nodes.layout import NodeLayout, members_of
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
from collectives.recovery.answers import watch
from collectives.recovery.fault_tolerance import (
    ADVICE,
    describe_failed,
    failed_ranks,
    is_tolerant,
    is_tolerant_job,
    reporting_deaths,
    revoke,
)
from collectives.recovery.half_made import guard_half_made
from collectives.recovery.newcomers import Newcomers
from collectives.recovery.regroup import Regroup
from collectives.recovery.witness import call_witness
from collectives.schedules.plan import Topology
from collectives.trace.flight_recorder import RecordedGroup, recorder_here

SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_limit`
_MAKING = "while the ranks made a communicator"

_Kind = TypeVar("_Kind")


class TwoLevels(Protocol):
    """Groups of a two-level exchange, within this rank's node and between nodes."""

    @property
    def local(self) -> Group:
        """Ranks of this rank's node."""
        ...

    @property
    def across(self) -> Group:
        """Ranks of several nodes, one of each."""
        ...

    def close(self) -> None:
        """Close both; collective."""
        ...


class Group(metaclass=Listed):
    """Ranks that make calls in one order; methods, executors and rings take it. A `Communicator` is the user's.

    Parameters
    ----------
    options : Options
        Checked arguments. Making a group is collective.

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
    observer : Observer or None
        Watches the calls, such as a trace.
    workers : Workers or None
        Threads that share the work on pieces.
    threads : int
        Number of threads that work on pieces.
    verifies : bool
        The ranks compare each collective before they make it.
    checked : callable
        Returns a communicator of MPI with checksums, if the messages of this group have them.
    checks_messages : bool
        Messages have checksums.
    route, route_parts : str, tuple of str
        The routes of messages in words, as a whole and one property each: ranks must agree on them.
    """

    listed: tuple[str, ...] = ()

    def __init__(self, options: Options) -> None:
        self.options = options
        self.checked = partial(with_checksums, checks=options.checksums)
        self.topology, self.workers = options.topology, options.workers
        self.timeout, self.arrival_timeout = options.timeout, options.arrival_timeout
        self.piece_bytes, self.verifies = options.piece_bytes, options.verify
        self.threads = 1 if self.workers is None else self.workers.threads
        if is_tolerant_job():
            guard_half_made()
        dead = self._dead_before = failed_ranks(MPI.COMM_WORLD)  # which end no call of this group
        with reporting_deaths(options.parent, _MAKING, dead):
            duplicated = opening.duplicate(options)
            pool, layouts, self._key = duplicated.mpi_comm, (duplicated.layout, duplicated.hosts), duplicated.key
            mpi_comm, members = pool, range(pool.size - options.spares)
            numbers: Sequence[int] = members
            if options.spares:
                numbers = members if pool.rank in members else (pool.rank,)
                mpi_comm = pool.Split(0 if pool.rank in members else pool.rank, pool.rank)
                mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        layout, hosts = (one.of_survivors(numbers, mpi_comm.rank) if options.spares else one for one in layouts)
        if options.link is not None:
            mpi_comm = slow_down(mpi_comm, options.link, layout.node_of)
        self.link = link_of(mpi_comm)
        self._nodes: dict[NodeLayout, Any] = {}  # its values are `TwoLevels`
        # Steps may be made again after a death, from the state of before; parts of this group inherit it.
        self.repeats_calls = options.regroups and pool.size > 1
        self.observer: Observer | None = None
        self._users = Users()
        self.calls = Calls(self._users)
        self.newcomers = Newcomers(self, pool, layouts, len(members)) if options.spares else None
        self.regroup: Regroup | None = None
        self._open(mpi_comm, layout, hosts)
        if self.repeats_calls:
            self.regroup = Regroup(self, leave_without_finalizing, fail_at_end, numbers)
            expect_deaths()
        self.calls.regroup = self.regroup
        self.fails_with_others = self.regroup is None and is_tolerant(self.missing.comm)
        self._agree(pool, duplicated.damage)
        self.traffic = Traffic()
        if options.observe is not None:
            with self.exchange():
                link = "" if self.link is None else str(self.link)
                self.observer = options.observe(self.mpi_comm, self.timeout, link, self.close)
            self.ending.observer = self.observer
        if self.regroup is not None:
            watch(self.regroup)

    def _agree(self, pool: MPI.Comm, damage: str) -> None:
        """Agree on the routes of messages, and on how the job ends; `damage` is that of a message received before."""
        if pool.size == MPI.COMM_WORLD.size and (is_tolerant(pool) or pool.size > 1):
            if is_tolerant(pool):
                meet_at_end(self.newcomers)
            with reporting_deaths(pool, _MAKING, self._dead_before), self.exchange(pool):
                call_witness(self.checked(pool), self.arrival_timeout)
        with reporting_deaths(self.missing.comm, _MAKING, self._dead_before), self.exchange():
            if damage:
                raise DamagedMessage(damage)
            try:
                self.network = opening.agree_on_network(self.mpi_comm, self.options.network, self.timeout)
            except ValueError:
                self.close()
                raise
            self._eager_bytes = (
                SHARED_PIECE_BYTES if self.one_node else opening.eager_piece_bytes(self.mpi_comm, self.timeout)
            )
        self._set_routes()

    def _open(self, mpi_comm: MPI.Comm, layout: NodeLayout, hosts: NodeLayout) -> None:
        """Make all that depends on the group of ranks, except for the routes of messages."""
        self.checks_messages = self.options.checksums and mpi_comm.size > 1
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
        history = RecordedGroup(recorder_here(), self._key_of_group(), self.rank, members, self.calls)
        self.calls.renew(mpi_comm, self.here, history)
        self.ending = Ending(
            self.calls, self.missing, self.size, self.workers, self.newcomers, self._call_check, self.dense_buffers
        )
        self.ending.observer, self.ending.dead_before = self.observer, self._dead_before
        end_with_process(self.ending)

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
        """Return the name of the group of ranks in its history: equal on all, also if survivors try twice."""
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
    def parts(self) -> tuple[Group, ...]:
        """Groups of nodes, which this one has made."""
        return tuple(part for nodes in self._nodes.values() for part in (nodes.local, nodes.across))

    @property
    def calls_in_flight(self) -> int:
        """Number of calls that have begun and not ended."""
        return len(self.calls.ordered)

    @property
    def failure(self) -> BaseException | None:
        """The error for which the communicator was given up."""
        return self.calls.failure

    def __del__(self) -> None:
        # MPI goes on writing to the buffers of a call under way, though no caller waits for it any more.
        calls = getattr(self, "calls", None)
        if calls is not None and calls.ordered:
            keep_alive(self)

    @property
    def lacks_thread_support(self) -> bool:
        """True if MPI was started in such a way that no progress thread can make calls."""
        return self.calls.lacks_thread_support

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
        observer = self.observer
        if observer is not None and meanwhile is not None:
            meanwhile = observer.around("prepare", meanwhile)
        steps = self._call_check.steps(call, mark, traffic, values, sums, meanwhile, combine)
        if observer is None:
            return steps
        return observer.around_check(call, steps, None if values is None else values.nbytes)

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
        if self.fails_with_others and (dead := describe_failed(self.mpi_comm, but=self._dead_before)):
            raise PeerFailure(f"{self.here}: {dead} died{ADVICE}") from MPI.Exception(MPI.ERR_PROC_FAILED)
        return self.missing.another_gave_up()

    def give_up(self, error: BaseException) -> None:
        """Reject further calls and end those in flight, here by `error`; the other ranks' waiting calls end too."""
        self.ending.give_up(error)

    def observe(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Return a context manager around a call, which observes it if there is an observer."""
        return nullcontext() if self.observer is None else self.observer.span("call", name, **details)

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

    # Parts of the ranks ----------------------------------------------------------------------------------------------

    def nodes_of(self, layout: NodeLayout) -> TwoLevels:
        """Return the groups of both levels of a layout; collective where first called for it."""
        raise NotImplementedError  # `Communicator` makes them, by `split`

    @property
    def layouts_of_nodes(self) -> tuple[NodeLayout, ...]:
        """The layouts for which `nodes_of` has made communicators."""
        return tuple(self._nodes)

    def close(self) -> None:
        """Free the communicator of MPI; collective. See `Communicator.close`."""

        def leave() -> None:
            if self.regroup is not None:
                say_farewell(self.regroup)
            elif not self.ending.keeps_requests:
                self.mpi_comm.Free()

        close(self, lambda: self._call_check if self.verifies else None, leave)

    def close_parts(self) -> None:
        """Close the groups of nodes with this one, and dismiss the ranks that wait."""
        if self.newcomers is not None:
            self.newcomers.dismiss()
        if self.regroup is None:
            for nodes in self._nodes.values():
                nodes.close()
        else:  # the ranks have agreed for all parts, and one may have died since
            for part in self.parts:
                end_closed(part)

    def free_unused(self) -> None:
        """Free the requests of long-lived users that are gone."""
        self._users.free_unused()

    def free_requests(self) -> None:
        """Free the requests and memory of a communicator that is closed."""
        self.dense_buffers.clear()
        self._users.free_all()
        self._call_check.free()
