"""Reducer of partial sums in codes: every hop decodes, adds and encodes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpi4py import MPI

from collectives import Communicator
from collectives.annotations import Testable, override
from collectives.execution.payload import MessageMemory
from collectives.execution.pipelined import execute
from collectives.execution.program import Message, Program
from mpicomp.aggregator.call import VectorCall
from mpicomp.aggregator.parts import Reducer, Round
from mpicomp.feedback.payloads import Payloads
from mpicomp.feedback.rounds import Work


class Cascade(Reducer):
    """Reducer that sums along the plan of the communicator's topology.

    It is also the payload of its program: a `collectives.execution.payload.MergedPayload`.

    Parameters
    ----------
    comm : Communicator
    program : Program
    held, landing : Payloads
        Codes of this rank's pieces, and memory for those of other ranks, of any piece.
    brief : bool
        As in `Reducer`.
    """

    encode: Work
    finish: Work
    merge: Callable[[Message, int], Testable | None]
    """Adds a code that has landed to the sum of its piece."""

    def __init__(
        self, comm: Communicator, program: Program, held: Payloads, landing: Payloads, brief: bool = False
    ) -> None:
        self.program, self._held, self._landing, self._tag = program, held, landing.host, comm.fixed_tag()
        self.brief, self.receive_buffers = brief or self.brief, len(self._landing)
        # persistent requests have a fixed length
        self._requests = None if held.varies else comm.users.persistent(self)
        self._messages = [[payload, payload.nbytes, MPI.BYTE] for payload in held.host]

    @override
    def run(self, call: VectorCall, work: Round, encoded: Callable[[], None]) -> Iterator[bool]:
        assert work.merge is not None
        self.encode, self.finish, self.merge = work.encode, work.decode, work.merge
        try:
            yield from execute(call, self.program, self, self._tag, call.traffic, encoded, self._requests)
        finally:
            # they are of this run alone
            del self.encode, self.finish, self.merge

    def outgoing(self, piece: int, weight: int) -> MessageMemory:
        """Return the code of a piece."""
        if self._held.varies:
            return [self._held.host[piece], self._held.count_sent(piece), MPI.BYTE]
        return self._messages[piece]

    def replacing(self, piece: int, weight: int) -> MessageMemory:
        """Return the memory for the code of the complete sum."""
        return self._messages[piece]

    def incoming(self, piece: int, buffer: int, weight: int) -> MessageMemory:
        """Return the memory for a code that will be added."""
        nbytes = self._messages[piece][1]
        return [self._landing[buffer][:nbytes], nbytes, MPI.BYTE]

    def prepare(self, message: Message, buffer: int) -> None:
        """Do nothing: signs cannot be drawn ahead, as their probabilities depend on the data."""
