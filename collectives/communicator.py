"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import choosing, exchange, transport
from collectives.agreement import Agreement, fingerprint
from collectives.arrays import FLOATS, INTEGERS, Flat, empty_like, flat
from collectives.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, PeerFailure
from collectives.execute import Execution
from collectives.halving import HalvingDoubling
from collectives.handle import Handle
from collectives.immortal import immortalize
from collectives.network import LinkModel
from collectives.payload import Cache, Payload
from collectives.plan import Plan, Topology
from collectives.program import Program, compile_plan
from collectives.ring import Ring
from collectives.sums import DenseSums, along_the_plan, fresh_places
from collectives.topologies import topology as topology_of
from collectives.trace.recorder import Trace
from collectives.traffic import Traffic
from collectives.waiting import Patience
from collectives.walk import Walk, walks

VERSION = 1  # of the wire format: ranks must agree on it
SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `transport`
LATENCY_BYTES = 16_384  # packed payloads below this go in the fewest rounds
AGREEING_S = 60.0  # at least, that ranks which are only starting are awaited
MOST_REMEMBERED = 512  # programs, and calls, of different lengths
_FIXED_TAGS, _ROLLING_TAGS = range(1, 16_000), range(16_000, 32_000)

Op = Literal["sum", "mean"]
_Value = TypeVar("_Value")


class Communicator:
    """A group of ranks and how they talk.

    Parameters
    ----------
    mpi_comm : MPI.Comm, optional
        Always duplicated; None: COMM_WORLD. Making a Communicator is collective.
    topology : str or Topology
        ``"ring"``, ``"segmented-ring"``, ``"torus"``, ``"tree"``, ``"double-tree"``, ``"halving-doubling"``,
        ``"star"``, an instance from `collectives`, ``"mpi"`` (dense sums by MPI's own all-reduce, everything else as
        "auto"), or ``"auto"``: by payload size.
    timeout : float
        Seconds without progress before a call raises `CollectiveTimeout`.
    verify : bool
        Check before each collective that all ranks make the same call (a few microseconds).
    piece_bytes : int, optional
        Longest message; None: by transport. Equal on all ranks.
    network : LinkModel, str or Path, optional
        What the ranks' network is like, or the file that ``mpicomp advise --save`` wrote: "auto" then takes the
        topology that the model of time finds fastest. The same on all ranks.
    trace : str or Path, optional
        Folder for a file per rank which tells what each call spent its time on; see docs/traces.md. On all ranks or
        on none.

    Attributes
    ----------
    traffic : Traffic
        What all calls of `allreduce` cost so far.
    trace : Trace or None

    Raises
    ------
    OSError
        A rank cannot write its trace; on every rank.
    TopologyError
        The topology does not fit this number of ranks.
    ValueError
        The network cannot be read, or ranks know different ones; on every rank.
    """

    _handle: ClassVar[type[Handle]] = Handle

    def __init__(
        self,
        mpi_comm: MPI.Comm | None = None,
        topology: str | Topology = "auto",
        timeout: float = 60.0,
        verify: bool = True,
        piece_bytes: int | None = None,
        network: LinkModel | str | Path | None = None,
        trace: str | Path | None = None,
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"the timeout must be a positive number of seconds, not {timeout}")
        if piece_bytes is not None and not 1 <= piece_bytes <= exchange.LARGEST:
            raise ValueError(f"piece_bytes must lie in 1 .. {exchange.LARGEST}, not {piece_bytes}")
        parent = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
        self.topology: str | Topology = topology if topology in ("auto", "mpi") else topology_of(topology)
        if not isinstance(self.topology, str):
            self.topology.plan(parent.rank, parent.size)
        self.mpi_comm = parent.Dup()
        self.mpi_comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank, self.size, self.timeout = parent.rank, parent.size, timeout
        node = self.mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_node = node.size == self.size
        node.Free()
        patience_s = max(timeout, AGREEING_S)
        self._eager_bytes = SHARED_PIECE_BYTES if self.one_node else transport.piece_bytes(self.mpi_comm, patience_s)
        self.piece_bytes = piece_bytes
        try:
            self.network = choosing.agreed(self.mpi_comm, network, patience_s)
        except ValueError:
            self.mpi_comm.Free()
            raise
        self._fastest = (
            None
            if self.network is None or self.size == 1
            else choosing.fastest(self.size, self.network, self.packed_piece_bytes())
        )
        self.traffic = Traffic()
        self._verify = verify
        self._sums = DenseSums(self.size, self.one_node)
        self._agreement = Agreement(self.mpi_comm, timeout, self._sums.swapped_bytes)
        self._plans: dict[Topology, Plan] = {}
        self._programs: dict[tuple[Topology, int, int, int], Program] = {}
        self._calls: dict[tuple[str, str, tuple[int, ...]], tuple[int, Callable[[], str]]] = {}
        self._fixed_tag, self._rolling_tag = 0, 0
        self._in_flight: list[Handle] = []
        self._broken = ""
        self.trace: Trace | None = None
        if trace is not None:
            from collectives.trace.calls import open_trace  # which builds on this module

            open_trace(self, trace)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._broken = self._broken or "it was left by an exception"
            immortalize(self)

    def __del__(self) -> None:
        # a call under way that nobody waits for any more: MPI goes on writing to its buffers
        if getattr(self, "_in_flight", None) or ("_agreement" in self.__dict__ and self._agreement.pending):
            immortalize(self)

    def close(self) -> None:
        """Free the MPI communicator (collective). After an error it is left to MPI's own clean-up instead."""
        if not self._broken:
            self._settle()
            self._agreement.free()
            self._sums.free()
            self.mpi_comm.Free()
            self._broken = "it was closed"

    @property
    def route(self) -> str:
        """How messages go, in words: what ranks must agree on."""
        pieces = f" in pieces of {self.piece_bytes} bytes" if self.piece_bytes else ""
        network = f" on {self.network}" if self.network is not None else ""
        return f"{self.topology}{pieces}{network}"

    # Choosing and preparing ------------------------------------------------------------------------------------------

    def select(self, payload_bytes: int) -> Topology:
        """The topology a payload of this size travels by."""
        if not isinstance(self.topology, str):
            return self.topology
        if self._fastest is not None:
            return self._fastest(payload_bytes)
        return HalvingDoubling() if payload_bytes < LATENCY_BYTES else Ring()

    def gathers(self, payload_bytes: int) -> bool:
        """Whether packed payloads of this size get round fastest in one all-gather, merged by every rank for itself."""
        few = payload_bytes * (self.size - 1) <= LATENCY_BYTES
        return self.size == 1 or (few and isinstance(self.topology, str))

    def packed_piece_bytes(self) -> int:
        """Longest message of packed payloads: what suits the transport."""
        return self.piece_bytes or self._eager_bytes

    def program(self, topology: Topology, n: int, alignment: int, piece_elements: int) -> Program:
        """One rank's part of an all-reduce of `n` elements, compiled once."""
        key = (topology, n, alignment, piece_elements)
        found = self._programs.get(key)
        if found is None:
            plan = self._plans.get(topology)
            if plan is None:
                plan = self._plans[topology] = topology.plan(self.rank, self.size)
            found = _remember(self._programs, key, compile_plan(plan, n, alignment, piece_elements))
        return found

    def fixed_tag(self) -> int:
        """A tag for one long-lived user of this communicator; all ranks ask in the same order."""
        self._fixed_tag += 1
        return _FIXED_TAGS[self._fixed_tag % len(_FIXED_TAGS)]

    def next_tag(self) -> int:
        """A tag for one call."""
        self._rolling_tag += 1
        return _ROLLING_TAGS[self._rolling_tag % len(_ROLLING_TAGS)]

    # What algorithms build on ----------------------------------------------------------------------------------------

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
        if self._verify or values is not None:
            try:
                self._agreement.check(mark, describe, traffic, values, sums, meanwhile)
            except CollectiveMismatch:
                raise  # nothing is in flight
            except BaseException as error:
                self.abandon(error)
                raise

    def refuse(self, error: Exception, call: str) -> NoReturn:
        """Raise `error` here, and CollectiveMismatch on the ranks that made the call.

        Ranks that refuse for the same reason at the same time agree, and each raises its own error.
        """
        text = f"rank {self.rank} refuses {call}: {error}"
        try:
            self.agree(fingerprint(text), lambda: text)
        except CollectiveMismatch as mismatch:
            raise error from mismatch
        raise error

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
        kind = Walk if walks(program, payload) else Execution
        execution = kind(self.mpi_comm, program, payload, tag, self.timeout, traffic, encoded, cache, self.trace)
        try:
            execution.run()
        except BaseException as error:
            self.abandon(error, execution)
            raise

    def wait(self, request: MPI.Request, describe: Callable[[], str], name: str = "wait") -> None:
        """Poll a request of this communicator's up to the timeout; `name` is what traces call it."""
        try:
            self._agreement.roll_call.wait(request, describe)
        except BaseException as error:
            self.abandon(error)
            raise

    def _progress(self) -> None:
        """Do one bit of everything in flight: other ranks may wait for another handle than this one does."""
        self._check_usable()
        try:
            self._in_flight = [handle for handle in self._in_flight if not handle.advance()]
        except BaseException as error:
            self.abandon(error)
            raise

    def _settle(self) -> None:
        """Finish what is in flight: a rank that waits in a blocking call cannot help others with their handles."""
        self._check_usable()
        while self._in_flight:
            self._progress()

    def abandon(self, error: BaseException, *alive: object) -> None:
        """Refuse further calls, as messages may still be in flight, and keep `alive`, their buffers' owners, for ever.

        Raises
        ------
        PeerFailure
            `error` is MPI's own; any other is the caller's to raise again.
        """
        self._broken = self._broken or f"an earlier call failed: {error!r}"
        immortalize(self, *alive)
        if isinstance(error, CollectiveTimeout):
            self._agreement.roll_call.answer()
        if isinstance(error, MPI.Exception):
            raise PeerFailure(f"rank {self.rank} of {self.size}: MPI says {error}") from error

    def _check_usable(self) -> None:
        if self._broken:
            raise CommunicatorClosed(
                f"rank {self.rank} of {self.size}: this communicator cannot be used, {self._broken}; make a new one"
            )

    # Dense collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Any:
        """Sum or mean over ranks of equally shaped arrays; equal on every rank, to the bit.

        Parameters
        ----------
        x : ndarray, CPU tensor, or anything with DLPack
            float16, bfloat16, float32, float64; for sums int32 and int64 too. Contiguous. Left alone unless it is
            `out`.
        op : "sum" or "mean"
        out : like x, optional
            Overwritten with the result.

        Returns
        -------
        like x

        Raises
        ------
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        TypeError, ValueError
            This rank's array cannot be reduced; the others then raise CollectiveMismatch.
        """
        source, target, result = self._arrays(x, op, out)
        call = self._call(source, op)
        self.dense(source.values, source.dtype, op == "mean", target.values, self.traffic, call)
        self.traffic.calls += 1
        return result

    def iallreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Handle:
        """Like `allreduce`, but returns at once. `x` and `out` must be left alone until the handle is done."""
        source, target, result = self._arrays(x, op, out)
        self._check_usable()
        mark, describe = self._call(source, op, "iallreduce")
        if self._verify:
            while self._agreement.pending:
                self._progress()
            try:
                self._agreement.begin(mark, describe)
            except BaseException as error:
                self.abandon(error)
                raise

        def start() -> Execution:
            # a call that the ranks do not agree on takes no tag, be it made by another method elsewhere
            vectors = source.values, source.dtype, op == "mean", target.values
            made = along_the_plan(self, *vectors, fresh_places)
            return Execution(self.mpi_comm, *made, self.next_tag(), self.timeout, Traffic(), trace=self.trace)

        patience = Patience(self.timeout, lambda: self._agreement.waiting(describe()))
        handle = self._handle(self._agreement.agreed, start, self._progress, patience, result)
        self._in_flight.append(handle)
        return handle

    def dense(
        self,
        values: NDArray[Any],
        dtype: str,
        mean: bool,
        out: NDArray[Any],
        traffic: Traffic,
        call: tuple[int, Callable[[], str]] | None = None,
        spare: Sequence[NDArray[Any]] = (),
    ) -> None:
        """Sum or mean of flat vectors, by whichever way is fastest.

        Parameters
        ----------
        values : ndarray[n]
            bfloat16 is uint16. Of a 16-bit dtype also a float32 copy, which is overwritten.
        dtype : str
            Element type: NumPy does not know bfloat16.
        mean : bool
            Divide by the number of ranks.
        out : ndarray[n]
            Overwritten with the result; may be `values`.
        traffic : Traffic
            Counted into.
        call : (int, callable), optional
            What `agree` is to compare; None: the ranks have agreed.
        spare : sequence of ndarray
            Memory that messages may land in; overwritten.
        """
        self._sums.sum(self, values, dtype, mean, out, traffic, call, spare)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite `x`, of equal shape and dtype everywhere, with rank `root`'s; returns `x`."""
        call = f"broadcast(root={root})"
        vector = self._flat(x, call, FLOATS + INTEGERS + ("uint8", "bool", "int8", "int16", "uint16"))
        if not vector.values.flags.writeable:
            problem = f"rank {self.rank} of {self.size}, {call}: the array is read-only; pass one that can be written"
            self.refuse(ValueError(problem), call)
        text = f"{call} of {vector.dtype}{list(vector.shape)}"
        self.agree(fingerprint(text), lambda: text)
        if not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: there is no rank {root} to broadcast from")
        payload = vector.values.view(np.uint8)
        try:
            exchange.broadcast(self.mpi_comm, payload, root, self.timeout)
        except BaseException as error:
            self.abandon(error, payload, vector)
            raise
        return x

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.agree(fingerprint("barrier"), lambda: "barrier()")
        if self.size > 1:
            self.wait(
                self.mpi_comm.Ibarrier(),
                lambda: f"rank {self.rank} of {self.size}: not all ranks reach the barrier",
                "barrier",
            )

    def _call(self, source: Flat, op: str, name: str = "allreduce") -> tuple[int, Callable[[], str]]:
        key = (f"{name}({op})", source.dtype, source.shape)
        found = self._calls.get(key)
        if found is None:
            text = f"{name}({op}) of {source.dtype}{list(source.shape)} by {self.route}, wire format {VERSION}"
            found = _remember(self._calls, key, (fingerprint(text), lambda: text))
        return found

    def _flat(self, x: Any, call: str, allowed: tuple[str, ...]) -> Flat:
        try:
            return flat(x, allowed)
        except (TypeError, ValueError) as error:
            named = type(error)(f"rank {self.rank} of {self.size}, {call}: {error}")
            self.refuse(named, call)

    def _arrays(self, x: Any, op: Op, out: Any) -> tuple[Flat, Flat, Any]:
        call = f"allreduce({op})"
        if op not in ("sum", "mean"):
            self.refuse(ValueError(f"rank {self.rank} of {self.size}: op is {op!r}; choose 'sum' or 'mean'"), call)
        source = self._flat(x, call, FLOATS + INTEGERS if op == "sum" else FLOATS)
        result = empty_like(x) if out is None else out
        target = self._flat(result, f"{call}, out", (source.dtype,))
        if target.shape != source.shape or not target.values.flags.writeable:
            problem = f"out has shape {target.shape}, the array {source.shape}, and out must be writeable"
            self.refuse(ValueError(f"rank {self.rank} of {self.size}, {call}: {problem}"), call)
        apart = not np.may_share_memory(source.values, target.values)
        if not apart and source.values.ctypes.data != target.values.ctypes.data:
            problem = "out overlaps the array; pass the array itself or one that shares no memory with it"
            self.refuse(ValueError(f"rank {self.rank} of {self.size}, {call}: {problem}"), call)
        return source, target, result


def _remember(known: dict[Any, _Value], key: Any, value: _Value) -> _Value:
    """Keep a value, and forget the oldest one of too many."""
    if len(known) >= MOST_REMEMBERED:
        del known[next(iter(known))]
    known[key] = value
    return value
