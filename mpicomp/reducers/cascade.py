"""Reducer of partial sums in codes: every hop decodes, adds and encodes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Bytes, Testable, override
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Work


class Cascade(Reducer):
    """Reducer that sums along the plan of the communicator's topology.

    It is also the payload of its program: a `collectives.execution.payload.MergedPayload`.

    Parameters
    ----------
    comm : Communicator
    program : Program
    held, landing : sequence of uint8 arrays
        Codes of this rank's pieces, and memory for those of other ranks, of any piece.
    merge : callable
        Adds a code that has landed to the sum of its piece.
    brief : bool
        As in `Reducer`.
    used : callable, optional
        Returns the bytes of a piece's code that are sent; None: all of them.
    """

    brief = False
    encode: Work
    finish: Work

    def __init__(
        self,
        comm: Communicator,
        program: Program,
        held: Sequence[Bytes],
        landing: Sequence[Bytes],
        merge: Callable[[Message, int], Testable | None],
        brief: bool = False,
        used: Callable[[int], int] | None = None,
    ) -> None:
        self.program, self._landing, self._merge, self._tag = program, landing, merge, comm.fixed_tag()
        self.brief, self._used = brief or self.brief, used
        # persistent requests have a fixed length
        self.receive_buffers, self._requests = len(landing), comm.persistent(self) if used is None else None
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in held]

    @override
    def run(self, call: VectorCall, encode: Work, decode: Work, encoded: Callable[[], None]) -> Iterator[bool]:
        self.encode, self.finish = encode, decode
        try:
            yield from execute(call, self.program, self, self._tag, call.traffic, encoded, self._requests)
        finally:
            # they are of this run alone
            del self.encode, self.finish

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the code of a piece."""
        if self._used is None:
            return self._messages[piece]
        return [self._messages[piece][0], self._used(piece), MPI.BYTE]

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for the code of the complete sum."""
        return self._messages[piece]

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for a code that will be added."""
        nbytes = self._messages[piece][1]
        return [self._landing[buffer][:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing: signs cannot be drawn ahead, as their probabilities depend on the data."""

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Add a code that has landed to the sum of its piece."""
        return self._merge(message, buffer)
