"""Group that make the same calls: how they agree on one, carry it out, and give up together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self
from weakref import ref

from mpi4py import MPI
from numpy.typing import NDArray

from collectives.consistency.call_check import Agreement, fingerprint
from collectives.consistency.recursive_doubling import most_bytes
from collectives.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, PeerFailure
from collectives.execution.handle import Handle
from collectives.execution.payload import Cache, Payload, free_all
from collectives.execution.pipelined import PipelinedExecution
from collectives.execution.program import Program
from collectives.execution.stepwise import StepwiseExecution, runs_stepwise
from collectives.progress.keep_alive import keep_alive
from collectives.progress.polling import Backoff
from collectives.trace.recorder import Trace
from collectives.trace.traffic import Traffic

_FIXED_TAGS, _ROLLING_TAGS = range(1, 16_000), range(16_000, 32_000)


class Group:
    """What every call of a communicator goes through.

    Parameters
    ----------
    parent : MPI.Comm
        Duplicated, which is collective.
    timeout : float
        Seconds without progress before a call raises `CollectiveTimeout`.
    verify : bool
        Check before each collective that all ranks make the same call.

    Attributes
    ----------
    mpi_comm : MPI.Comm
        The duplicate.
    rank, size : int
    one_node : bool
        Whether all ranks share memory.
    swapped_bytes : int
        Longest vector that can be summed together with the check of a call.
    trace : Trace or None
    """

    _handle: Callable[..., Handle] = Handle

    def __init__(self, parent: MPI.Comm, timeout: float, verify: bool) -> None:
        self.mpi_comm = parent.Dup()
        self.mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self.timeout = parent.rank, parent.size, timeout
        node = self.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_node = node.size == self.size
        node.Free()
        self.swapped_bytes = most_bytes(self.size, self.one_node)
        self.trace: Trace | None = None
        self._verify = verify
        self._agreement = Agreement(self.mpi_comm, timeout, self.swapped_bytes)
        self._fixed_tag, self._rolling_tag = 0, 0
        self._in_flight: list[Handle] = []
        self._held: dict[int, tuple[ref[object], Callable[[], None]]] = {}  # by the reference's identity
        self._gone: list[ref[object]] = []
        self._broken = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._broken = self._broken or "it was left by an exception"
            keep_alive(self)

    def __del__(self) -> None:
        # a call under way that nobody waits for any more: MPI goes on writing to its buffers
        if getattr(self, "_in_flight", None) or ("_agreement" in self.__dict__ and self._agreement.pending):
            keep_alive(self)

    def close(self) -> None:
        """Free the MPI communicator (collective). After an error it is left to MPI's own clean-up instead."""
        if not self._broken:
            self._settle()
            self._free()
            self._broken = "it was closed"

    def _free(self) -> None:
        for _, free in self._held.values():
            free()
        self._held.clear()
        self._agreement.free()
        self.mpi_comm.Free()

    def free_after(self, owner: object, free: Callable[[], None]) -> None:
        """Have a long-lived user's persistent requests freed when it is gone, at the next call, or when this is closed.

        Not by a finalizer, which may run in any thread, and at a time when MPI is not to be called. Until then the
        requests' buffers stay, too.

        Parameters
        ----------
        owner : object
            The user; referred to weakly.
        free : callable
            Frees its requests, of which none is active when it is called; holds no reference to `owner`.
        """
        user = ref(owner, self._gone.append)
        self._held[id(user)] = user, free

    def _free_what_is_left(self) -> None:
        while self._gone:
            _, free = self._held.pop(id(self._gone.pop()))
            free()

    def persistent(self, owner: object) -> Cache:
        """Where a long-lived user keeps the persistent requests of one program on the same buffers."""
        cache: Cache = {}
        self.free_after(owner, partial(free_all, cache))
        return cache

    def fixed_tag(self) -> int:
        """A tag for one long-lived user of this communicator; all ranks ask in the same order."""
        self._fixed_tag += 1
        return _FIXED_TAGS[self._fixed_tag % len(_FIXED_TAGS)]

    def next_tag(self) -> int:
        """A tag for one call."""
        self._rolling_tag += 1
        return _ROLLING_TAGS[self._rolling_tag % len(_ROLLING_TAGS)]

    # Agreeing --------------------------------------------------------------------------------------------------------

    def agree(
        self,
        mark: int,
        describe: Callable[[], str],
        traffic: Traffic | None = None,
        values: NDArray[Any] | None = None,
        sums: NDArray[Any] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Raise on every rank unless all make this call; a small vector may be summed on the way.

        See `Agreement.check`. Without a check nothing is done `meanwhile` either.
        """
        if self._broken or self._in_flight:
            self._settle()
        if self._gone:
            self._free_what_is_left()
        if self._verify or values is not None:
            try:
                self._agreement.check(mark, describe, traffic, values, sums, meanwhile)
            except CollectiveMismatch:
                raise  # nothing is in flight
            except BaseException as error:
                self.abort(error)
                raise

    def reject(self, error: Exception, call: str) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that made the call.

        Group that refuse for the same reason at the same time agree, and each raises its own error.
        """
        text = f"rank {self.rank} refuses {call}: {error}"
        try:
            self.agree(fingerprint(text), lambda: text)
        except CollectiveMismatch as mismatch:
            raise error from mismatch
        raise error

    # Carrying out ----------------------------------------------------------------------------------------------------

    def execute(
        self,
        program: Program,
        payload: Payload,
        tag: int,
        traffic: Traffic,
        encoded: Callable[[], None] | None = None,
        cache: Cache | None = None,
    ) -> None:
        """Run a program to its end."""
        kind = StepwiseExecution if runs_stepwise(program, payload) else PipelinedExecution
        execution = kind(self.mpi_comm, program, payload, tag, self.timeout, traffic, encoded, cache, self.trace)
        try:
            execution.run()
        except BaseException as error:
            self.abort(error, execution)
            raise

    def start(
        self, mark: int, describe: Callable[[], str], make: Callable[[], PipelinedExecution], result: Any
    ) -> Handle:
        """Start a call that goes on in the background.

        Parameters
        ----------
        mark, describe
            As for `agree`.
        make : callable
            The execution, once all ranks are known to make this call.
        result : object
            What the handle returns.
        """
        self._check_usable()
        if self._verify:
            while self._agreement.pending:
                self._progress()
            try:
                self._agreement.begin(mark, describe)
            except BaseException as error:
                self.abort(error)
                raise
        backoff = Backoff(self.timeout, lambda: self._agreement.waiting(describe()))
        handle = self._handle(self._agreement.agreed, make, self._progress, backoff, result)
        self._in_flight.append(handle)
        return handle

    def wait(self, request: MPI.Request, describe: Callable[[], str], name: str = "wait") -> None:
        """Poll a request of this communicator's up to the timeout; `name` is what traces call it."""
        try:
            self._agreement.missing_ranks.wait(request, describe)
        except BaseException as error:
            self.abort(error)
            raise

    def _progress(self) -> None:
        """Do one bit of everything in flight: other ranks may wait for another handle than this one does."""
        self._check_usable()
        try:
            self._in_flight = [handle for handle in self._in_flight if not handle.advance()]
        except BaseException as error:
            self.abort(error)
            raise

    def _settle(self) -> None:
        """Finish what is in flight: a rank that waits in a blocking call cannot help others with their handles."""
        self._check_usable()
        while self._in_flight:
            self._progress()

    # Giving up -------------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException, *alive: object) -> None:
        """Refuse further calls, as messages may still be in flight, and keep `alive`, their buffers' owners, for ever.

        Raises
        ------
        PeerFailure
            `error` is MPI's own; any other is the caller's to raise again.
        """
        first, self._broken = not self._broken, self._broken or f"an earlier call failed: {error!r}"
        keep_alive(self, *alive)
        try:
            if isinstance(error, CollectiveTimeout):
                self._agreement.missing_ranks.answer()
            if isinstance(error, MPI.Exception):
                raise PeerFailure(f"rank {self.rank} of {self.size}: MPI says {error}") from error
        finally:
            if first:
                self._given_up()

    def _given_up(self) -> None:
        """Called once, before the error is raised with which somebody may end the job."""

    def _check_usable(self) -> None:
        if self._broken:
            raise CommunicatorClosed(
                f"rank {self.rank} of {self.size}: this communicator cannot be used, {self._broken}; make a new one"
            )
