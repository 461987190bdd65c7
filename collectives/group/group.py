"""A group of ranks: its messages, routes and tags, and its calls in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from mpi4py import MPI

from collectives.annotations import AnyArray, Bytes
from collectives.arrays.elements import Combine, add
from collectives.consistency.call_check import CallCheck
from collectives.consistency.descriptions import fingerprint
from collectives.consistency.missing_ranks import MissingRanks
from collectives.consistency.recursive_doubling import most_bytes
from collectives.errors import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    DamagedMessage,
    marked,
    refuse_copies,
    reword,
)
from collectives.execution.call import Call, Steps
from collectives.execution.handle import Handle
from collectives.execution.observer import Observer
from collectives.execution.recovery import Recovery
from collectives.execution.traffic import Traffic
from collectives.group import opening
from collectives.group.calls import Calls, await_request
from collectives.group.closing import close
from collectives.group.ending import Ending
from collectives.group.opening import Duplicate, GroupOptions
from collectives.group.routes import Routes
from collectives.group.users import Users
from collectives.listed_names import Listed
from collectives.nodes.layout import NodeLayout, members_of
from collectives.process_end import end_with_process, forget_endings
from collectives.progress.polling import giving_up_by, keep_alive, wait
from collectives.states import State

if TYPE_CHECKING:
    from collectives.communicator.nodes import Nodes

SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_limit`


@refuse_copies(lambda one: one.here, "make another one, or leave it out")
class Group(metaclass=Listed):
    """Ranks that make calls in one order; methods, executors and rings take it. A `Communicator` is the user's.

    Parameters
    ----------
    options : GroupOptions
        Checked arguments. Making a group is collective.

    Attributes
    ----------
    rank, size : int
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
    levels : dict
        Groups of two-level exchanges, which `nodes_of` has made, by their layouts.
    routes : Routes
        Topologies, lengths of messages and programs.
    users : Users
        Tags, requests and shared objects of long-lived users.
    calls : Calls
        Calls in flight, and their order.
    call_check : CallCheck
        Comparison of calls, whose messages sum short vectors.
    ending : Ending
        End of the communicator after a call that failed.
    missing : MissingRanks
        Messages about ranks that do not come.
    losses : Losses
        Deaths of ranks, as MPI reports them.
    recovery : Recovery or None
        Goes on with the calls after ranks are lost; None: the first loss ends them.
    repeats_calls : bool
        Steps may be made again from the state of before; parts of this group inherit it.
    traffic : Traffic
        Cost of all calls of `allreduce` so far.
    dense_buffers : list of uint8 arrays
        Receive buffers of dense sums, from one call to the next.
    observer : Observer or None
        Watches the calls, such as a trace.
    workers : Workers or None
        Threads that share the work on pieces.
    verifies : bool
        The ranks compare each collective before they make it.
    """

    listed: tuple[str, ...] = ()

    def __init__(self, options: GroupOptions) -> None:
        self.options = options
        self.topology, self.workers, self.link = options.topology, options.workers, options.link
        self.timeout, self.arrival_timeout, self.verifies = options.timeout, options.arrival_timeout, options.verify
        self.losses = options.losses
        with self.losses.reported(options.parent):
            everyone = opening.duplicate(options)
            mine = self.losses.members_of(everyone)
        self.key = everyone.key
        self.levels: dict[NodeLayout, Nodes] = {}
        self.observer: Observer | None = None
        self.recovery: Recovery | None = None
        self.users = Users()
        self.calls = Calls(self.users)
        self._open(options.slowed(mine.mpi_comm, mine.layout.node_of), mine.layout, mine.hosts)
        self.recovery = self.calls.recovery = self.losses.recovery_of(self, everyone)
        self.repeats_calls = self.recovery is not None
        self.losses.join_job(self, everyone.mpi_comm)
        self._agree(everyone)
        self.traffic = Traffic()
        if options.observe is not None:
            with self.exchange():
                self.observer = options.observe(self.mpi_comm, self.timeout, options.link_text, self.close)
            self.ending.observer = self.observer
        self.losses.watch()

    def _agree(self, found: Duplicate) -> None:
        """Agree on the routes of messages, or raise for a message that was damaged before."""
        options = self.options
        with self.losses.reported(self.missing.comm), self.exchange():
            if found.damage:
                raise DamagedMessage(found.damage)
            try:
                known = opening.agree_on_network(self.mpi_comm, options.network, self.timeout)
            except ValueError:
                self.close()
                raise
            eager = SHARED_PIECE_BYTES if self.one_node else opening.eager_piece_bytes(self.mpi_comm, self.timeout)
        self.routes = Routes(self.rank, self.size, self.topology, known, options.piece_bytes, eager, options.link_text)

    def _open(self, mpi_comm: MPI.Comm, layout: NodeLayout, hosts: NodeLayout) -> None:
        """Make all that depends on the group of ranks, except for the routes of messages."""
        self.mpi_comm: Any = self.options.checked(mpi_comm)
        self.layout, self.hosts = layout, hosts
        self.rank, self.size, self.here = layout.rank, mpi_comm.size, f"rank {layout.rank} of {mpi_comm.size}"
        self.one_node = len(layout.sizes) == 1 and self.link is None
        self.missing = MissingRanks(mpi_comm, self.timeout)
        has_checksums = self.options.checksums and self.size > 1
        most = most_bytes(self.size, self.one_node)
        self.call_check = CallCheck(self.mpi_comm, self.missing, most, has_checksums)
        self.dense_buffers: list[Bytes] = []
        # equal on all ranks, also if those that are left try twice
        key = self.key if self.recovery is None else f"{self.key}+{self.recovery.count + 1}"
        self.calls.renew(mpi_comm, self.here, self.options.history(key, self.rank, members_of(mpi_comm), self.calls))
        kept = self.call_check, self.dense_buffers
        self.ending = Ending(self.calls, self.missing, self.workers, self.losses, *kept)
        self.ending.observer = self.observer
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
            for other in others:
                self.losses.revoke(other)
            raise ended from error.__cause__

    def renew(self, mpi_comm: MPI.Comm, numbers: Sequence[int], layouts: Sequence[NodeLayout]) -> None:
        """Go on with the ranks that had these numbers in the layouts of nodes and hosts; `mpi_comm` is theirs.

        Raises
        ------
        TopologyError
            The topology does not fit their number.
        """
        ended = [self.ending, *(part.ending for part in self.parts)]
        # MPI may still write there
        keep_alive(self.ending, self.call_check, self.dense_buffers, *self.levels.values())
        self.levels.clear()
        self.users.renew()
        self._open(mpi_comm, *(one.of_ranks(numbers, mpi_comm.rank) for one in layouts))
        forget_endings(ended)  # behind `_open`: the handler at the program's end keeps its place while one is left
        if not isinstance(self.topology, str):
            self.topology.plan(self.rank, self.size)
        self.routes = self.routes.of_ranks(self.rank, self.size)

    @property
    def members(self) -> tuple[int, ...]:
        """Rank that each rank had when the communicator was made; other numbers only after ranks are lost."""
        return tuple(range(self.size)) if self.recovery is None else self.recovery.members

    @property
    def parts(self) -> tuple[Group, ...]:
        """Groups of nodes, which this one has made and nobody has closed."""
        made = (part for nodes in self.levels.values() for part in (nodes.local, nodes.across))
        return tuple(part for part in made if part.calls.state is not State.CLOSED)

    def __del__(self) -> None:
        # MPI goes on writing to the buffers of a call under way, though no caller waits for it any more.
        calls = getattr(self, "calls", None)
        if calls is not None and calls.ordered:
            keep_alive(self)

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
        try:
            self.calls.open(call, steps)
            return call.wait()
        except BaseException as error:
            self.calls.end_undriven(call, error)
            raise

    def begin(self, call: Call, steps: Steps) -> Handle:
        """Make a call that goes on in the background; raises as `run` does."""
        return self.calls.begin(call, steps)

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
        steps = self.call_check.steps(call, mark, traffic, values, sums, meanwhile, combine)
        if observer is None:
            return steps
        return observer.around_check(call, steps, None if values is None else values.nbytes)

    def enter(self, call: Call) -> None:
        """Give a call its number now, before the ranks begin to compare it."""
        if (self.verifies or call.is_compared) and not call.is_pairwise:
            self.call_check.enter(call)

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
        text = f"rank {self.rank} {reason}"
        with suppress(CollectiveMismatch, CollectiveTimeout):  # this rank's own error is more precise
            self.agree(fingerprint(reason.replace(self.here, "")), lambda: text)
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
        if self.losses.end_calls:
            self.losses.raise_if_any(self.mpi_comm, self.here)
        return self.missing.another_gave_up()

    def observe(self, name: str, **details: object) -> AbstractContextManager[None]:
        """Return a context manager around a call, which observes it if there is an observer."""
        return nullcontext() if self.observer is None else self.observer.span("call", name, **details)

    def fixed_tag(self) -> int:
        """Return a tag for one long-lived user of this communicator; all ranks take theirs in the same order."""
        return self.users.fixed_tag()

    @contextmanager
    def tags_unused(self, unless_made: bool = False) -> Iterator[None]:
        """Take back the tags of long-lived users that are made in this block; `unless_made`: only if it fails."""
        with ExitStack() as stack:
            for one in (self, *self.parts):
                stack.enter_context(one.users.tags_unused(unless_made))
            yield

    # Parts of the ranks ----------------------------------------------------------------------------------------------

    def nodes_of(self, layout: NodeLayout) -> Nodes:
        """Return the groups of both levels of a layout; collective where first called for it."""
        raise NotImplementedError  # `Communicator` makes them, by `split`

    def close(self) -> None:
        """Free the communicator of MPI; collective. See `Communicator.close`."""
        close(self)
