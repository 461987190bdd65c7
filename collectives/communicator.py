"""Communicator: the user's handle on a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mpi4py import MPI
from numpy.typing import NDArray

from collectives import planner
from collectives.compiling import keep_uncompiled
from collectives.cost.link import LinkModel
from collectives.dense.allreduce import DenseSums, is_small
from collectives.exchanges import Exchanges
from collectives.execution.handle import Call, Handle, Steps
from collectives.execution.program import Program
from collectives.grid import Grid, arranged
from collectives.making import examined
from collectives.memory import Flat
from collectives.numbers import NUMBERS, allreduce_number
from collectives.open_trace import open_trace
from collectives.operands import operands, operation
from collectives.progress.limits import eager_piece_bytes
from collectives.routes import Routes
from collectives.schedules.plan import Topology, TopologyError
from collectives.split import split
from collectives.trace.traffic import Traffic

SHARED_PIECE_BYTES = 800_000  # packed payloads within a node: few, large pieces; between nodes, see `eager_piece_bytes`

Op = Literal["sum", "mean", "min", "max"] | MPI.Op


class Communicator(Exchanges):
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
    alone : bool
        Let COMM_WORLD be all there is, even where a launcher started more processes than MPI has joined; so does
        ``MPICOMP_ALONE=1``. In a process that a rank has started, MPI then makes a job of this process alone.
    abort_hook : bool
        Call `install_abort_hook`, if there are several ranks and these are all of the job; not in an interactive
        session, nor under pytest.

    Attributes
    ----------
    traffic : Traffic
        Cost of all calls of `allreduce` so far.
    trace : Trace or None

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
        eager_bytes = SHARED_PIECE_BYTES if self.one_node else eager_piece_bytes(self.mpi_comm, timeout)
        self.piece_bytes = piece_bytes
        self._sums = DenseSums()
        try:
            self.network = planner.agreed(self.mpi_comm, network, timeout)
        except ValueError:
            self.close()
            raise
        self._routes = Routes(self.rank, self.size, self.topology, self.network, piece_bytes, eager_bytes)
        self.traffic = Traffic()
        if trace is not None:
            self.trace = open_trace(self.mpi_comm, trace, timeout, self.close)

    @property
    def threads(self) -> int:
        """How many threads work on pieces."""
        return 1 if self.workers is None else self.workers.threads

    def __repr__(self) -> str:
        return f"<Communicator rank {self.rank} of {self.size}, {self.topology}>"

    def _free(self) -> None:
        self._sums.free()
        super()._free()

    @property
    def route(self) -> str:
        """How messages go, in words: what ranks must agree on."""
        return str(self._routes)

    @property
    def route_parts(self) -> tuple[str, ...]:
        """The same, one thing each."""
        return self._routes.parts

    # Choosing and preparing ------------------------------------------------------------------------------------------

    def select(self, payload_bytes: int) -> Topology:
        """The topology a payload of this size travels by."""
        return self._routes.select(payload_bytes)

    def gathers(self, payload_bytes: int) -> bool:
        """Whether packed payloads of this size get round fastest in one all-gather, merged by every rank for itself."""
        return self._routes.gathers(payload_bytes)

    def packed_piece_bytes(self) -> int:
        """Longest message of packed payloads: what suits the transport."""
        return self._routes.packed_piece_bytes()

    def program(self, topology: Topology, n: int, alignment: int, piece_elements: int) -> Program:
        """One rank's part of an all-reduce of `n` elements, compiled once."""
        return self._routes.program(topology, n, alignment, piece_elements)

    # Dense collectives -----------------------------------------------------------------------------------------------

    @keep_uncompiled
    def allreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Any:
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
        """
        name = operation(self, op)
        if isinstance(x, NUMBERS):
            with self._span("allreduce", op=name):
                return allreduce_number(self, x, name, out, self.traffic)
        source, target, result = operands(self, x, name, out)
        mark, describe = self._routes.all_reduce(source, name, "allreduce")
        call = Call(self, describe, self.traffic.clock)
        call.is_compared = is_small(self, source.values, source.dtype)
        steps = self._sums.of_arrays(self, call, source, target, name, self.traffic, mark)
        if self.trace is None:
            self.run(call, steps)
        else:
            with self._span("allreduce", op=name, bytes=source.values.nbytes):
                self.run(call, steps)
        self.traffic.calls += 1
        return result

    @keep_uncompiled
    def iallreduce(self, x: Any, op: Op = "sum", out: Any = None) -> Handle:
        """Like `allreduce` of an array, but returns at once. Do not touch `x` and `out` until the handle is done."""
        name = operation(self, op)
        source, target, result = operands(self, x, name, out)
        mark, describe = self._routes.all_reduce(source, name, "iallreduce")
        call = Call(self, describe)
        call.result = result
        call.is_compared = is_small(self, source.values, source.dtype)
        steps = self._sums.of_arrays(self, call, source, target, name, Traffic(), mark, background=True)
        with self._span("iallreduce", op=name, bytes=source.values.nbytes):
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
        scratch: Sequence[NDArray[Any]] | None = None,
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
        scratch : sequence of ndarray, optional
            Memory for receive buffers; overwritten. With it, though it may be empty, messages are no longer than 1 MiB,
            so that a method which needs little memory keeps little for its dense rounds.
        mark : int, optional
            Fingerprint of the call where the ranks have not agreed yet: they then do so before the sum, or with it.
        """
        return self._sums.steps(self, call, values, dtype, mean, out, traffic, scratch, mark)

    def mean_of_arrays(self, call: Call, source: Flat, target: Flat, traffic: Traffic) -> Steps:
        """Like `dense_steps` for the mean of arrays that are on one device; `target` is overwritten."""
        return self._sums.of_arrays(self, call, source, target, "mean", traffic, None)

    # Parts -----------------------------------------------------------------------------------------------------------

    @keep_uncompiled
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
        return arranged(self, shape, self.split)
