"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import planner
from collectives.consistency.call_check import fingerprint
from collectives.cost.link import LinkModel
from collectives.dense import variable_size
from collectives.dense.allreduce import DenseSums, along_the_plan, fresh_places
from collectives.execution.handle import Handle
from collectives.execution.pipelined import PipelinedExecution
from collectives.execution.program import Program, compile_plan
from collectives.group import Group
from collectives.memory import FLOATS, INTEGERS, Flat
from collectives.operands import operands, writable_operand
from collectives.progress import eager_limit
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, Topology
from collectives.schedules.registry import topology as topology_of
from collectives.schedules.ring import Ring
from collectives.trace.traffic import Traffic

VERSION = 1  # of the wire format: ranks must agree on it
SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_limit`
LATENCY_BYTES = 16_384  # packed payloads below this go in the fewest rounds
AGREEING_S = 60.0  # at least, that ranks which are only starting are awaited
MOST_REMEMBERED = 512  # programs, and calls, of different lengths

Op = Literal["sum", "mean"]
_Value = TypeVar("_Value")


class Communicator(Group):
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
        if piece_bytes is not None and not 1 <= piece_bytes <= variable_size.LARGEST:
            raise ValueError(f"piece_bytes must lie in 1 .. {variable_size.LARGEST}, not {piece_bytes}")
        parent = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
        self.topology: str | Topology = topology if topology in ("auto", "mpi") else topology_of(topology)
        if not isinstance(self.topology, str):
            self.topology.plan(parent.rank, parent.size)
        super().__init__(parent, timeout, verify)
        patience_s = max(timeout, AGREEING_S)
        self._eager_bytes = SHARED_PIECE_BYTES if self.one_node else eager_limit.piece_bytes(self.mpi_comm, patience_s)
        self.piece_bytes = piece_bytes
        self._sums = DenseSums()
        try:
            self.network = planner.agreed(self.mpi_comm, network, patience_s)
        except ValueError:
            self.close()
            raise
        self._fastest = (
            None
            if self.network is None or self.size == 1
            else planner.fastest(self.size, self.network, self.packed_piece_bytes())
        )
        self.traffic = Traffic()
        self._plans: dict[Topology, Plan] = {}
        self._programs: dict[tuple[Topology, int, int, int], Program] = {}
        self._calls: dict[tuple[str, str, tuple[int, ...]], tuple[int, Callable[[], str]]] = {}
        if trace is not None:
            from collectives.trace.calls import open_trace  # which builds on this module

            open_trace(self, trace)

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}>"

    def _free(self) -> None:
        self._sums.free()
        super()._free()

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
        source, target, result = operands(self, x, op, out)
        call = self._call(source, op)
        self.dense(source.values, source.dtype, op == "mean", target.values, self.traffic, call)
        self.traffic.calls += 1
        return result

    def iallreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Handle:
        """Like `allreduce`, but returns at once. `x` and `out` must be left alone until the handle is done."""
        source, target, result = operands(self, x, op, out)

        def make() -> PipelinedExecution:
            # a call that the ranks do not agree on takes no tag, be it made by another method elsewhere
            vectors = source.values, source.dtype, op == "mean", target.values
            made = along_the_plan(self, *vectors, fresh_places)
            return PipelinedExecution(self.mpi_comm, *made, self.next_tag(), self.timeout, Traffic(), trace=self.trace)

        return self.start(*self._call(source, op, "iallreduce"), make, result)

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
        vector = writable_operand(self, x, call, (*FLOATS, *INTEGERS, "uint8", "bool", "int8", "int16", "uint16"))
        text = f"{call} of {vector.dtype}{list(vector.shape)}"
        self.agree(fingerprint(text), lambda: text)
        if not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: there is no rank {root} to broadcast from")
        payload = vector.values.view(np.uint8)
        try:
            variable_size.broadcast(self.mpi_comm, payload, root, self.timeout)
        except BaseException as error:
            self.abort(error, payload, vector)
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


def _remember(known: dict[Any, _Value], key: Any, value: _Value) -> _Value:
    """Keep a value, and forget the oldest one of too many."""
    if len(known) >= MOST_REMEMBERED:
        del known[next(iter(known))]
    known[key] = value
    return value
