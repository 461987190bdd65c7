"""Reducer of cascading compression: every hop decodes, adds and encodes again, which Marsit avoids."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Testable, override
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Work
from mpicomp.feedback.payloads import Payloads


class Cascade(Reducer):
    """Reducer that sums along the plan of the communicator's topology.

    It is also the payload of its program: a `collectives.execution.payload.MergedPayload`.

    Parameters
    ----------
    comm : Communicator
    program : Program
    held, landing : Payloads
        Codes of this rank's pieces, and memory for those of other ranks.
    merge : callable
        Adds a code that has landed to the sum of its piece.
    """

    brief = False
    encode: Work
    finish: Work

    def __init__(
        self,
        comm: Communicator,
        program: Program,
        held: Payloads,
        landing: Payloads,
        merge: Callable[[Message, int], Testable | None],
    ) -> None:
        self.program, self._landing, self._merge, self._tag = program, landing, merge, comm.fixed_tag()
        self.receive_buffers = len(landing.host)
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in held.host]

    @override
    def run(self, call: VectorCall, encode: Work, decode: Work, encoded: Callable[[], None]) -> Iterator[bool]:
        self.encode, self.finish = encode, decode
        try:
            yield from execute(call, self.program, self, self._tag, call.traffic, encoded)
        finally:
            # they are of this run alone
            del self.encode, self.finish

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for the code of a piece, which is sent, or which the complete sum replaces."""
        return self._messages[piece]

    replacing = outgoing

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for a code that will be added."""
        nbytes = self._messages[piece][1]
        return [self._landing.host[buffer][:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing: signs cannot be drawn ahead, as their probabilities depend on the data."""

    def merge(self, message: Message, buffer: int) -> Testable | None:
        """Add a code that has landed to the sum of its piece."""
        return self._merge(message, buffer)
