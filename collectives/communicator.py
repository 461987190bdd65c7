"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from mpi4py import MPI
from numpy.typing import NDArray

from collectives import planner
from collectives.consistency.call_check import fingerprint
from collectives.cost.link import LinkModel
from collectives.dense.allreduce import DenseSums, is_small
from collectives.dense.broadcast import broadcast, is_long, way_of
from collectives.dense.gather import all_gather_rows
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.program import Program, compile_plan
from collectives.execution.staged import staged
from collectives.grid import Grid, require_shape
from collectives.making import examined
from collectives.memory import COPIED, Flat
from collectives.numbers import NUMBERS, allreduce_number
from collectives.objects import all_gather_object, broadcast_object
from collectives.open_trace import open_trace
from collectives.operands import operands, require_root, rows_operand, writable_operand
from collectives.point_to_point import PointToPoint
from collectives.progress import eager_limit
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Plan, Topology, TopologyError
from collectives.schedules.ring import Ring
from collectives.split import split
from collectives.trace.clock import compare
from collectives.trace.traffic import Traffic

VERSION = 1  # of the wire format: ranks must agree on it
SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_limit`
LATENCY_BYTES = 16_384  # packed payloads below this go in the fewest rounds
MOST_REMEMBERED = 512  # programs, and calls, of different lengths

Op = Literal["sum", "mean", "min", "max"]
_Value = TypeVar("_Value")


class Communicator(PointToPoint):
    """A group of ranks and how they talk.

    Parameters
    ----------
    mpi_comm : MPI.Comm, optional
        Always duplicated; None: COMM_WORLD. Making a Communicator is collective.
    topology : str or Topology
        ``"ring"``, ``"segmented-ring"``, ``"torus"``, ``"tree"``, ``"double-tree"``, ``"halving-doubling"``,
        ``"star"``, an instance from `collectives`, ``"mpi"`` (dense sums by MPI's own all-reduce, everything else as
        "auto"), or ``"auto"``: by payload size.
    timeout : float, optional
        Seconds without progress within a call before it raises `CollectiveTimeout`. None: the environment's
        ``MPICOMP_TIMEOUT``, else 60.
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
    arrival_timeout : float, optional
        Seconds that a rank may come later to a call than the others, which warn of it from 15 s on. None: the
        environment's ``MPICOMP_ARRIVAL_TIMEOUT``, else 1800, or `timeout` if that is longer. It holds for making the
        communicator too, and without `verify` for a whole call.
    threads : int
        So many threads encode, merge and decode pieces while the calling one polls; 1: that one does it all. Results
        are the same with any number, and ranks may have different ones. Worth it for methods that compute long
        (quantizers, entropy coding, top-k) on a rank that has several cores to itself; dense sums go on without.
    alone : bool
        Let COMM_WORLD be all there is, even where a launcher started more processes than MPI has joined; so does
        ``MPICOMP_ALONE=1``.
    abort_hook : bool
        Call `install_abort_hook`, if there are several ranks and these are all of the job; not in an interactive
        session, nor under pytest.

    Attributes
    ----------
    traffic : Traffic
        What all calls of `allreduce` cost so far.
    trace : Trace or None

    Raises
    ------
    CollectiveTimeout
        Names the ranks that do not make a communicator.
    CollectiveMismatch
        Names the ranks that make none because of an argument, of which they raise the error.
    LauncherMismatch
        A launcher started more processes than MPI has joined, which would train separate models.
    OSError
        A rank cannot write its trace; on every rank.
    TopologyError
        The topology does not fit this number of ranks.
    TypeError, ValueError
        An argument cannot be used. On every rank: the network cannot be read, or ranks know different ones.
    """

    def __init__(
        self,
        mpi_comm: MPI.Comm | None = None,
        topology: str | Topology = "auto",
        timeout: float | None = None,
        verify: bool = True,
        piece_bytes: int | None = None,
        network: LinkModel | str | Path | None = None,
        trace: str | Path | None = None,
        *,
        arrival_timeout: float | None = None,
        threads: int = 1,
        alone: bool = False,
        abort_hook: bool = True,
    ) -> None:
        made = examined(mpi_comm, topology, timeout, arrival_timeout, piece_bytes, threads, alone, abort_hook)
        timeout, self.topology = made.timeout, made.topology
        super().__init__(made.parent, timeout, made.arrival_timeout, verify)
        self.workers = made.workers
        self._eager_bytes = SHARED_PIECE_BYTES if self.one_node else eager_limit.piece_bytes(self.mpi_comm, timeout)
        self.piece_bytes = piece_bytes
        self._sums = DenseSums()
        try:
            self.network = planner.agreed(self.mpi_comm, network, timeout)
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
        self._calls: dict[tuple[str, str, str, tuple[int, ...]], tuple[int, Callable[[], str]]] = {}
        if trace is not None:
            self.trace = open_trace(self.mpi_comm, trace, timeout, self.close)

    @property
    def threads(self) -> int:
        """How many threads work on pieces."""
        return 1 if self.workers is None else self.workers.threads

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}>"

    def _before_free(self) -> None:
        if self.trace is not None:
            self.trace.readings.append(compare(self.mpi_comm, self.trace.clock, self.timeout))

    def _free(self) -> None:
        self._sums.free()
        super()._free()
        if self.trace is not None:
            self.trace.write()

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
        """Sum, mean, minimum or maximum over ranks of equally shaped arrays, or of numbers; equal on every rank.

        Parameters
        ----------
        x : ndarray, tensor, anything with DLPack, or a number
            float16, bfloat16, float32, float64; but for means int32 and int64 too. Contiguous. Left alone unless it is
            `out`. Of numbers bool, int and float, also NumPy's; of one type on all ranks.
        op : "sum", "mean", "min" or "max"
            Minimum and maximum are NaN where a rank has NaN.
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
        """
        if isinstance(x, NUMBERS):
            with self._span("allreduce", op=op):
                return allreduce_number(self, x, op, out, self.traffic)
        source, target, result = operands(self, x, op, out)
        mark, describe = self._call(source, op, "allreduce")
        call = Call(self, describe, self.traffic.clock)
        call.is_compared = is_small(self, source.values, source.dtype)
        steps = self._sums.of_arrays(self, call, source, target, op, self.traffic, mark)
        if self.trace is None:
            self.run(call, steps)
        else:
            with self._span("allreduce", op=op, bytes=source.values.nbytes):
                self.run(call, steps)
        self.traffic.calls += 1
        return result

    def iallreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Handle:
        """Like `allreduce` of an array, but returns at once. Do not touch `x` and `out` until the handle is done."""
        source, target, result = operands(self, x, op, out)
        mark, describe = self._call(source, op, "iallreduce")
        call = Call(self, describe)
        call.result = result
        steps = self._sums.of_arrays(self, call, source, target, op, Traffic(), mark, background=True)
        with self._span("iallreduce", op=op, bytes=source.values.nbytes):
            return self.begin(call, steps)

    def dense(self, values: NDArray[Any], dtype: str, mean: bool, out: NDArray[Any], traffic: Traffic) -> None:
        """Make `dense_steps` a call of its own, on which the ranks do not agree before."""
        call = Call(self, lambda: "a dense sum", traffic.clock)
        self.run(call, self.dense_steps(call, values, dtype, mean, out, traffic))

    def dense_steps(
        self,
        call: Call,
        values: NDArray[Any],
        dtype: str,
        mean: bool,
        out: NDArray[Any],
        traffic: Traffic,
        scratch: Sequence[NDArray[Any]] = (),
        mark: int | None = None,
    ) -> Steps:
        """Sum or mean of flat vectors by the fastest way, as part of a call on which the ranks have agreed.

        Parameters
        ----------
        call : Call
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
        scratch : sequence of ndarray
            Memory for receive buffers; overwritten.
        mark : int, optional
            Fingerprint of the call where the ranks have not agreed yet: they then do so before the sum, or with it.
        """
        return self._sums.steps(self, call, values, dtype, mean, out, traffic, scratch, mark)

    def mean_of_arrays(self, call: Call, source: Flat, target: Flat, traffic: Traffic) -> Steps:
        """Like `dense_steps` for the mean of arrays that are on one device; `target` is overwritten."""
        return self._sums.of_arrays(self, call, source, target, "mean", traffic, None)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Overwrite `x`, of equal shape and dtype everywhere, with rank `root`'s; returns `x`.

        Any dtype of `allreduce`, and bool and the other integers of 8 and 16 bits.
        """
        name = f"broadcast(root={root})"
        vector = writable_operand(self, x, name, COPIED)
        text = f"{name} of {vector.dtype}{list(vector.shape)}"
        require_root(self, root, text)
        nbytes = vector.values.nbytes
        call = Call(self, lambda: text)
        call.is_compared = is_long(vector)

        def check(ready: Any) -> Steps:
            return self.check(call, fingerprint(text), None, ready, ready)

        with self._span("broadcast", root=root, bytes=nbytes):
            program = partial(self.program, way_of(nbytes, root), nbytes, 64, nbytes)
            self.run(call, broadcast(call, vector, root, check, program))
        return x

    def allgather(self, x: Any) -> Any:
        """The rows of all ranks in one new array, rank 0's first; as on every rank.

        Parameters
        ----------
        x : array[n, ...]
            Of a dtype of `broadcast`, contiguous. `n` may differ from rank to rank and may be 0; dtype and shape of a
            row are equal on all ranks.

        Returns
        -------
        like x, array[sum of the ranks' n, ...]

        Raises
        ------
        CollectiveMismatch
            The ranks differ in dtype or shape of a row.
        TypeError, ValueError
            This rank's array cannot be gathered; the others then raise CollectiveMismatch.
        CollectiveTimeout, PeerFailure
        """
        rows = rows_operand(self, x, "allgather", COPIED)
        text = f"allgather of rows of {rows.dtype}{list(rows.shape[1:])}"
        call = Call(self, lambda: text)
        with self._span("allgather", bytes=rows.values.nbytes):
            steps = all_gather_rows(call, self.check(call, fingerprint(text)), x, rows)
            return self.run(call, staged(call, steps, rows.staging, None))

    def barrier(self) -> None:
        """Wait until every rank is here."""
        call = Call(self, lambda: "barrier()")
        with self._span("barrier"):
            self.run(call, self._barrier(call, self.check(call, fingerprint("barrier"))))

    def _barrier(self, call: Call, check: Steps) -> Steps:
        yield from check
        if self.size > 1:
            yield from self.turn_of(call)
            missing = f"{self.here}: not all ranks reach the barrier"
            yield from self.await_request(call, self.mpi_comm.Ibarrier(), lambda: missing)

    # Objects ---------------------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank `root`'s object on every rank: itself there, and copies elsewhere, where `obj` does not matter.

        The object is pickled. Unpickling runs code that `root` chose: trust the program of every rank.

        Raises
        ------
        TypeError
            This rank cannot pickle or unpickle it; the others then raise CollectiveMismatch.
        ValueError
            There is no rank `root`.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        """
        require_root(self, root, f"broadcast_object(root={root})")
        with self._span("broadcast_object", root=root):
            return broadcast_object(self, obj, root)

    def allgather_object(self, obj: Any) -> list[Any]:
        """Copies of every rank's object, in rank order, on every rank; pickled, and raises, as `broadcast_object`."""
        with self._span("allgather_object"):
            return all_gather_object(self, obj)

    # Parts -----------------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, topology: str | Topology | None = None) -> Communicator | None:
        """A communicator of the ranks that give the same colour; collective.

        It has this one's timeouts, `verify`, `piece_bytes` and `threads`, but neither its network, which other groups
        may load at the same time, nor its trace. Close it yourself: closing this one does not.

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
            This rank's colour or key is none; the others then raise CollectiveMismatch.
        CollectiveMismatch, CollectiveTimeout, PeerFailure
        """
        with self._span("split"):
            part = split(self, color, key)
        if part is None:
            return None
        chosen = self.topology if topology is None else topology
        try:
            made = Communicator(
                part,
                chosen,
                self.timeout,
                self._verify,
                self.piece_bytes,
                arrival_timeout=self.arrival_timeout,
                threads=self.threads,
                abort_hook=False,  # this one has installed it, or was told not to
            )
        except TopologyError as error:
            part.Free()
            raise TopologyError(f"{self.here}, split(color={color}): {error}; pass another topology to it") from error
        part.Free()
        return made

    def grid(self, **shape: int) -> Grid[Communicator]:
        """Arrange the ranks on a Cartesian grid, as in ``comm.grid(replica=2, stage=4)``; collective.

        Parameters
        ----------
        **shape : int
            Ranks along each axis. Ranks that follow each other are neighbours along the last one, so name last the
            axis along which most is sent: launchers fill one node after the other.

        Returns
        -------
        Grid
            With a communicator along each axis, made by `split`; close it, or use it in a ``with`` block.

        Raises
        ------
        ValueError
            The grid does not have as many ranks as there are; on every rank that passes it.
        CollectiveMismatch
            The ranks pass different grids.
        """
        text = f"grid({', '.join(f'{axis}={length}' for axis, length in shape.items())})"
        try:
            require_shape(shape, self.size)
        except ValueError as error:
            self.reject(ValueError(f"{self.here}: {error}"), text)
        self.agree(fingerprint(text), lambda: text)
        along: dict[str, Communicator] = {}
        stride = self.size
        for axis, length in shape.items():
            stride //= length
            place = self.rank // stride % length
            along[axis] = self.split(self.rank - place * stride, key=place, topology=None)  # type: ignore[assignment]
        return Grid(shape, self.rank, along)

    def _call(self, source: Flat, op: str, name: str = "allreduce") -> tuple[int, Callable[[], str]]:
        key = (name, op, source.dtype, source.shape)
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
