"""Dense sums of a communicator: which way a vector goes, and the memory that messages land in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.dense.payload import SIXTEEN_BIT, DensePayload, travelling_itemsize
from collectives.errors import CollectiveMismatch
from collectives.execution.program import Program
from collectives.memory import aligned_empty, narrow, widen
from collectives.schedules.halving_doubling import HalvingDoubling
from collectives.schedules.plan import Topology
from collectives.schedules.ring import Ring
from collectives.trace.traffic import Traffic

if TYPE_CHECKING:
    from collectives.communicator import Communicator

Bytes = NDArray[np.uint8]
Call = tuple[int, Callable[[], str]]

PIECE_BYTES = 1 << 20
SHORT_BYTES = 1 << 17  # messages below this cost more on fast networks than they save on slow ones
SLOTS = 3
# From here up "auto" takes the ring, below MPI's own all-reduce: bytes a rank, and bytes altogether.
RING_BYTES_A_RANK, RING_BYTES = 512 << 10, 4 << 20

_WITHIN_A_CALL = 0, lambda: "a dense sum within a call that the ranks agreed on"


class DenseSums:
    """One communicator's, which is handed in at each call: a reference to it would be a cycle.

    Attributes
    ----------
    kept : list of uint8 arrays
        Where messages land, one call after the other.
    """

    def __init__(self) -> None:
        self.kept: list[Bytes] = []

    def free(self) -> None:
        """Give memory back."""
        self.kept.clear()

    def sum(
        self,
        comm: Communicator,
        values: NDArray[Any],
        dtype: str,
        mean: bool,
        out: NDArray[Any],
        traffic: Traffic,
        call: Call | None,
        spare: Sequence[NDArray[Any]],
    ) -> None:
        """See `Communicator.dense`."""
        nbytes = values.size * travelling_itemsize(values, dtype)
        swaps = comm.size > 1 and comm.topology == "auto" and nbytes <= comm.swapped_bytes
        if call is not None and not swaps:
            comm.agree(*call, traffic)
        try:
            if comm.size == 1:
                if values.dtype == out.dtype:
                    out[:] = values
                else:
                    narrow(values, dtype, out)
            elif swaps:
                _at_once(comm, values, dtype, mean, out, traffic, call or _WITHIN_A_CALL)
            elif _by_mpi(comm, nbytes):
                _at_once(comm, values, dtype, mean, out, traffic, None)
            else:
                made = along_the_plan(comm, values, dtype, mean, out, lambda nbytes: self._places(nbytes, spare))
                comm.execute(*made, comm.next_tag(), traffic)
        except CollectiveMismatch:
            raise  # nothing is in flight
        except BaseException as error:
            comm.abort(error, values, out)  # the other ranks may be in the middle of it
            raise

    def _places(self, nbytes: int, spare: Sequence[NDArray[Any]]) -> list[Bytes]:
        """Where messages land: in what is lent, else in what is kept from one call to the next."""
        places = [array.reshape(-1).view(np.uint8) for array in spare if array.nbytes >= nbytes][:SLOTS]
        missing = SLOTS - len(places)
        if nbytes > PIECE_BYTES:
            return places + fresh_places(nbytes)[:missing]
        if any(place.nbytes < nbytes for place in self.kept):
            self.kept = []
        while len(self.kept) < missing:
            self.kept.append(aligned_empty(nbytes, np.uint8))
        return places + self.kept[:missing]


def fresh_places(nbytes: int) -> list[Bytes]:
    """Memory for one call's messages."""
    return [aligned_empty(nbytes, np.uint8) for _ in range(SLOTS)]


def along_the_plan(
    comm: Communicator,
    values: NDArray[Any],
    dtype: str,
    mean: bool,
    out: NDArray[Any],
    places: Callable[[int], Sequence[Bytes]],
) -> tuple[Program, DensePayload]:
    """What sums along a topology's plan; `places` gives messages of so many bytes where to land."""
    itemsize = travelling_itemsize(values, dtype)
    known = comm.network is not None or not isinstance(comm.topology, str)
    topology = comm.select(values.size * itemsize) if known else Ring()
    program = comm.program(topology, values.size, 64, max(1, _piece_bytes(comm, topology) // itemsize))
    return program, DensePayload(program, values, dtype, mean, places(program.longest_piece * itemsize), out)


def _piece_bytes(comm: Communicator, topology: Topology) -> int:
    """Longest message: long ones cost least, but two hosts that swap them over TCP must not shake hands first.

    The answer to the hand-shake waits behind the megabytes that its sender has handed to the kernel before, and so the
    two send one after the other instead of at once, which takes twice as long.
    """
    if comm.piece_bytes:
        return comm.piece_bytes
    eager = comm.packed_piece_bytes()
    swapping = comm.size == 2 or isinstance(topology, HalvingDoubling)
    return eager if swapping and not comm.one_node and eager >= SHORT_BYTES else PIECE_BYTES


def _by_mpi(comm: Communicator, nbytes: int) -> bool:
    own = min(RING_BYTES, RING_BYTES_A_RANK * comm.size)
    return comm.topology == "mpi" or (comm.topology == "auto" and nbytes < own)


def _at_once(
    comm: Communicator,
    values: NDArray[Any],
    dtype: str,
    mean: bool,
    out: NDArray[Any],
    traffic: Traffic,
    call: Call | None,
) -> None:
    """Sum whole vectors: together with the check of a `call`, or by MPI's own all-reduce."""
    start = traffic.clock()
    source, sums = values, out
    if dtype in SIXTEEN_BIT:
        source = sums = values if values.dtype == np.float32 else np.empty(values.size, np.float32)
        if sums is not values:
            widen(values, dtype, sums)
    if call is not None:
        comm.agree(*call, traffic, source, sums)
    else:
        # MPI reduces in place on all ranks or on none, so that must not hang on what this rank's `out` is
        if np.may_share_memory(source, sums) and dtype not in SIXTEEN_BIT:
            source = source.copy()
        _mpi_allreduce(comm, source, sums, traffic)
    if mean:
        np.divide(sums, comm.size, out=sums)
    if sums is not out:
        narrow(sums, dtype, out)
    traffic.seconds_total += traffic.clock() - start


def _mpi_allreduce(comm: Communicator, source: NDArray[Any], sums: NDArray[Any], traffic: Traffic) -> None:
    # with its type named, since mpi4py derives none for memory that is not aligned
    kind = MPI.Datatype.fromcode(sums.dtype.char)
    message: Any = MPI.IN_PLACE if source is sums else [source, sums.size, kind]
    request = comm.mpi_comm.Iallreduce(message, [sums, sums.size, kind])
    comm.wait(request, lambda: f"rank {comm.rank} of {comm.size}: MPI's all-reduce does not end", "MPI's all-reduce")
    rounds = math.ceil(math.log2(comm.size))
    traffic.messages += rounds
    traffic.bytes_sent += (
        sums.nbytes * rounds if sums.nbytes < 10_000 else 2 * sums.nbytes * (comm.size - 1) // comm.size
    )
